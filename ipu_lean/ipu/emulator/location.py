"""Where in the user's program an op was called: source line and module path, for messages."""
from __future__ import annotations

import os
import sys
from typing import Dict, NamedTuple, Sequence

import torch

_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_FUNCTION = os.path.join(_TORCH, "autograd", "function.py")
_HERE = os.path.dirname(os.path.abspath(__file__))


class Where(NamedTuple):
    """A place in the user's program.

    `module` is a dotted path in the traced model ("" for the model itself); `function` the autograd.Function whose forward ran.
    """

    module: str
    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        module = f"module `{self.module}`" if self.module else "the model"
        return f"in {module}, {self.file}:{self.line}" if self.file else f"in {module}"


def find(modules: Dict[int, str], excludes: Sequence[str] = ()) -> Where:
    """Walk up from the caller: the first line outside torch and the emulator, and the innermost traced module.

    `modules` maps `id(module)` to its path.
    """
    file, line, module, function = "", 0, None, ""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_HERE):
            if name == _FUNCTION and frame.f_code.co_name == "apply":
                function = getattr(frame.f_locals.get("cls"), "__name__", "")
            if module is None and frame.f_code.co_varnames[:1] == ("self",):
                module = modules.get(id(frame.f_locals.get("self")))
            if not file and not name.startswith(_TORCH) and not name.startswith("<") and not any(e in name for e in excludes):
                file, line = name, frame.f_lineno
        elif file:
            break
        frame = frame.f_back
    return Where(module or "", file, line, function)
