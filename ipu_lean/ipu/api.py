"""The one place that imports PopTorch. Everything else is handed the module: the real one, or the emulator by the same names."""

from __future__ import annotations

import importlib
from typing import Any

from ipu_lean.errors import EnvironmentProblem


def load_poptorch(device: str) -> Any:
    """The PopTorch module for `ipu` (the real one) or `ipu-emulated`.

    Raises:
        EnvironmentProblem: PopTorch cannot be imported here.
    """
    if device == "ipu-emulated":
        return importlib.import_module("ipu_lean.ipu.emulator")
    assert device == "ipu", device
    try:
        import poptorch
    except Exception as problem:  # a wrong torch version is an AssertionError, a missing library an OSError
        text = " ".join(str(problem).split()) or type(problem).__name__
        raise EnvironmentProblem(
            f"`device: ipu` needs PopTorch, which cannot be imported here ({text}). It comes with Graphcore's Poplar SDK, which "
            "must be enabled in this shell and wants torch 2.0.1 (docs/ipu.md). `device: ipu-emulated` runs the same path "
            "without it."
        ) from problem
    return poptorch
