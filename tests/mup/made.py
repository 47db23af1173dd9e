"""Figures made from power laws, so that every slope is known: what a clean network gives, and whatever a test changes."""
from __future__ import annotations

from typing import Any, Callable, Dict, Optional

from ipu_lean.mup.figures import BRANCH, HIDDEN, OUTPUT, STREAM, Coordinate, Figures, Signature, TensorFigure

WIDTHS = (64, 128, 256)
# name: (shape, label, power of the start, power of an update)
TENSORS: Dict[str, Any] = {
    "embedding.weight": (lambda w: (100, w), "embedding", 0.0, 0.0),
    "layers.0.up.weight": (lambda w: (4 * w, w), "hidden", -0.5, -1.0),
    "layers.0.down.weight": (lambda w: (w, 4 * w), "hidden", -0.5, -1.0),
    "layers.0.up.bias": (lambda w: (4 * w,), "vector", None, 0.0),
    "norm.weight": (lambda w: (w,), "vector", 0.0, 0.0),
    "readout.weight": (lambda w: (100, w), "readout", None, 0.0),
}
MODULES = {"embed": HIDDEN, "layer0.attention": BRANCH, "stack": STREAM, "head": OUTPUT}


def figures(
    start: Optional[Dict[str, float]] = None,
    update: Optional[Dict[str, float]] = None,
    change: Optional[Dict[str, float]] = None,
    values: Optional[Dict[str, float]] = None,
    scores: float = -0.5,
    readout: float = -0.5,
    decay: float = 0.0,
    last_rate: Optional[Dict[str, float]] = None,
    head_size: Callable[[int], int] = lambda w: w // 4,
    seeds: int = 1,
    family: str = "adam",
    rate: Optional[Dict[str, float]] = None,
) -> Figures:
    """A network of one layer over `WIDTHS`. Dicts give other powers by name; None in `change` means no change at all."""
    found = Figures(family=family)
    for width in WIDTHS:
        for seed in range(seeds):
            wobble = 1.0 + 0.01 * seed
            for name, (shape, label, std, moved) in TENSORS.items():
                std = (start or {}).get(name, std)
                moved = (update or {}).get(name, moved)
                built = (rate or {}).get(name, moved)
                found.tensors.append(
                    TensorFigure(
                        width, seed, name, shape(width), 0.0 if std is None else wobble * width**std, wobble * width**moved, 2,
                        width**moved, width**built, width ** (last_rate or {}).get(name, built), 0.01 * width**decay, label,
                    )
                )  # fmt: skip
            for module, role in MODULES.items():
                for step in (0, 1, 2, 4, 8):
                    power = (change or {}).get(module, 0.0)
                    moved = 0.0 if step == 0 or power is None else 0.3 * wobble * width**power
                    size = width ** (values or {}).get(module, 0.0)
                    found.coordinates.append(Coordinate(width, seed, step, module, role, size, size, moved, moved, moved))
            heads = {"attention": wobble * width**scores}
            found.signatures.append(Signature(width, seed, heads, head_size(width), width**readout, width))
    return found
