"""`train.compile: branches`: torch.compile for each branch of a stack, with a plain run where that cannot be had."""

from __future__ import annotations

import time
from typing import Any, Callable, List, Optional

from torch import nn

from ipu_lean._compat import TORCH, no_compiler

BACKEND = "inductor"
_OLDEST = (2, 2)


def branches_of(model: nn.Module) -> List[nn.Module]:
    """Each branch once; shared ones come several times in a stack."""
    found = {id(branch): branch for block in model.layers.executed() for branch in block.branches}
    return list(found.values())


def unavailable(device_type: str) -> Optional[str]:
    """Why branches cannot be compiled for this device, or None."""
    if TORCH < _OLDEST or not hasattr(nn.Module, "compile"):
        return f"torch {'.'.join(map(str, TORCH))} is too old (2.2 or newer is needed)"
    return no_compiler(device_type)


def compile_branches(model: nn.Module, device_type: str, warm_up: Callable[[], Any], say: Callable[[str], None]) -> bool:
    """Compile every branch in place: names of parameters stay, and `deepcopy` or a checkpoint sees nothing of it.

    Args:
        warm_up: a training and an evaluation pass, in which the compiler does its work.
        say: is told once how long that took, or why nothing was compiled.
    Returns:
        Whether the branches are compiled.
    """
    found, problem = branches_of(model), unavailable(device_type)
    started = time.perf_counter()
    if problem is None:
        # Random numbers as in an uncompiled run: the same dropout, and a generator that can be put back.
        options = {"fallback_random": True} if BACKEND == "inductor" else {}
        for branch in found:
            branch.compile(backend=BACKEND, dynamic=False, options=options)
        try:
            warm_up()
        except Exception as error:  # a compiler that does not work raises anything
            problem = f"the compiler failed: {' '.join(str(error).split())[:200]}"
    if problem is not None:
        for branch in found:
            branch._compiled_call_impl = None
        say(f"train.compile: {problem}. The branches run uncompiled, which changes numbers by rounding only.")
        return False
    say(f"train.compile: {len(found)} branches compiled in {time.perf_counter() - started:.1f} s")
    return True
