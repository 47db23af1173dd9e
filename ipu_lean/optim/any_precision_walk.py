"""One update of one stretch of parameters, block by block: plain, compiled or eager."""
from __future__ import annotations

import logging
import time
import warnings
from typing import Any, Dict

import torch

from ipu_lean.optim import any_precision_rules as rules
from ipu_lean.optim.any_precision_buffers import Block, Stretch, bare
from ipu_lean.optim.any_precision_options import summation_of

EAGER_BLOCK = 1 << 14  # elements: the eager path's temporaries stay in the second-level cache
COMPILED_BLOCK = 1 << 20
GPU_BLOCK = 1 << 30
SHORT = 64  # elements; blocks below run eagerly, because a compiler would make versions of their own for some lengths
log = logging.getLogger(__name__)


class Walk:
    """Updates blocks of `stretch` by the settings of `group`; `longest`: the most elements a block should have."""

    def __init__(self, group: Dict[str, Any], stretch: Stretch, compiled: bool) -> None:
        self.group, self.stretch = group, stretch
        self.summation = summation_of(group, stretch.dtype)
        self.noisy = group["variance"] == "stochastic"
        self.wide = torch.float64 if stretch.dtype == torch.float64 else torch.float32
        gradients = {p.grad.dtype for p in stretch.parameters if p.grad is not None}
        self.plain = self.summation == "none" and {stretch.dtype, *stretch.kinds.values(), *gradients} == {self.wide}
        # Compilers drop fp16's rounding inside the Kahan step; bf16's is done by hand.
        self.compiled = compiled and not self.plain and stretch.dtype != torch.float16
        longest = GPU_BLOCK if stretch.device.type == "cuda" else COMPILED_BLOCK if self.compiled else EAGER_BLOCK
        self.longest = min(longest, stretch.size)
        self.draws = self.noisy or self.summation == "stochastic"
        self._scalars: Dict[float, torch.Tensor] = {}

    def update(self, block: Block, step: float) -> None:
        """Update `step` (1 is the first) of one block."""
        begin, end, gradient = block
        w, m, v, *kept = self.stretch.slices(begin, end)
        if self.plain:
            rules.update_plain(w, gradient, m, v, self.group, step)
            return
        words = rules.noise_key(self.group["seed"], int(step), self.stretch.position + begin)
        key = torch.tensor(words, dtype=torch.int32, device=self.stretch.device)
        index = bare(self.stretch.index(self.longest), 0, end - begin) if self.draws else None
        rest = (self._numbers(step), index, key, self.summation, self.noisy, self.group["maximize"])
        if self.compiled and end - begin >= SHORT:
            self._run_compiled((w, gradient, m, v, *kept, *rest))
        else:
            rules.update(w, gradient, m, v, *kept, *rest)

    def _numbers(self, step: float) -> torch.Tensor:
        if step not in self._scalars:
            group = self.group
            eps = max(group["eps"], rules.EPS_FLOOR)
            values = rules.scalars(float(group["lr"]), group["betas"], eps, group["weight_decay"], step)
            self._scalars[step] = torch.tensor(values, dtype=self.wide, device=self.stretch.device)
        return self._scalars[step]

    def _run_compiled(self, arguments: Any) -> None:
        """The compiled rule; the eager one, with a warning, if compiling fails (which happens before anything is changed)."""
        kinds = [value.dtype if torch.is_tensor(value) else value for value in arguments]
        signature = (self.stretch.device.type, torch.get_num_threads(), *kinds)
        if rules.is_compiled(signature):
            rules.compiled(signature)(*arguments)
            return
        if signature in _failed:
            rules.update(*arguments)
            return
        started = time.perf_counter()
        try:
            rules.compiled(signature)(*arguments)
            log.info("compiled the optimizer's %s update in %.1f s", self.summation, time.perf_counter() - started)
        except Exception as error:  # a missing header, a compiler that is not one, …
            rules.forget(signature)
            _failed.add(signature)
            warnings.warn(f"the optimizer goes on without compiled code ({str(error).splitlines()[0]})", stacklevel=2)
            rules.update(*arguments)


_failed: Any = set()
