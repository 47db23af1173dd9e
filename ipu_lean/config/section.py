"""The base of every section: frozen, strict, and closed to keys that it does not know.

The files of this room that pydantic reads do without `from __future__ import annotations`: pydantic evaluates
their annotations, and on Python 3.8 only `Optional[...]`, `List[...]` and their kin survive that.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of the configuration: plain data, compared by value, never changed after it was read.

    Strict: an integer is never made from a float or a bool, a number never from a string.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


def setting(default: Any, description: str, **limits: Any) -> Any:
    """A field with its default, the sentence that teaches it, and its limits (`ge=`, `gt=`, `le=`, `lt=`, …)."""
    return Field(default, description=description, **limits)


def section(kind: Any, description: str) -> Any:
    """A nested section, all defaults."""
    return Field(default_factory=kind, description=description)
