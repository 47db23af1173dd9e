"""muP: base shapes, roles, and the table that explains them. Knows no model of ours; nothing here changes a weight."""
from __future__ import annotations

from ipu_lean.mup.base_shapes import base_shapes_from_pair, base_shapes_from_width, finite_base_shapes, shapes_of, shapes_on_meta
from ipu_lean.mup.bsh import BaseShapes, base_hash, load_bsh, save_bsh
from ipu_lean.mup.explain import collapse_rows, explain_rows, format_table
from ipu_lean.mup.infshape import InfDim, InfShape, attach_infshapes, make_infshape
from ipu_lean.mup.roles import Role, compute_roles, role_of_infshape, roles_from_json, roles_to_json

__all__ = [
    "BaseShapes",
    "InfDim",
    "InfShape",
    "Role",
    "attach_infshapes",
    "base_hash",
    "base_shapes_from_pair",
    "base_shapes_from_width",
    "collapse_rows",
    "compute_roles",
    "explain_rows",
    "finite_base_shapes",
    "format_table",
    "make_infshape",
    "load_bsh",
    "role_of_infshape",
    "roles_from_json",
    "roles_to_json",
    "save_bsh",
    "shapes_of",
    "shapes_on_meta",
]
