"""One update of one stretch of parameters, block by block: plain, compiled or eager."""
from __future__ import annotations

import logging
import time
import warnings
from typing import Any, Dict, Optional, Set, Tuple

import torch

from ipu_lean.optim import any_precision_rules as rules
from ipu_lean.optim import native
from ipu_lean.optim.any_precision_buffers import Block, Stretch, bare
from ipu_lean.optim.any_precision_options import summation_of

EAGER_BLOCK = 1 << 16  # elements: the eager path's temporaries stay in cache
COMPILED_BLOCK = 1 << 20
GPU_BLOCK = 1 << 30
SHORT = 64  # elements; blocks below run eagerly, because a compiler would make versions of their own for some lengths
log = logging.getLogger(__name__)


class Walk:
    """Updates blocks of `stretch` by the settings of `group`, from gradients of these types.

    `longest`: the most elements a block should have.
    """

    def __init__(self, group: Dict[str, Any], stretch: Stretch, gradients: Set[torch.dtype], compiled: bool) -> None:
        self.group, self.stretch = group, stretch
        self.summation = summation_of(group, stretch.dtype)
        self.noisy = group["variance"] == "stochastic"
        self.wide = torch.float64 if stretch.dtype == torch.float64 else torch.float32
        self.plain = self.summation == "none" and {stretch.dtype, *stretch.kinds.values(), *gradients} == {self.wide}
        # Compilers drop fp16's rounding inside the Kahan step; bf16's is done by hand.
        self.compiled = compiled and not self.plain and stretch.dtype != torch.float16
        self.native = self.compiled and gradients <= {torch.bfloat16}
        self.native = self.native and native.usable(stretch.device, stretch.dtype, stretch.kinds, group["maximize"])
        longest = GPU_BLOCK if stretch.device.type == "cuda" else COMPILED_BLOCK if self.compiled else EAGER_BLOCK
        self.longest = min(longest, stretch.size)
        self.draws = self.noisy or self.summation == "stochastic"
        self._work = native.Work() if self.native else None
        self._scalars: Dict[float, torch.Tensor] = {}
        self._rules: Dict[torch.dtype, rules.Rule] = {}

    def update(self, block: Block, step: float) -> None:
        """Update `step` (1 is the first) of one block."""
        begin, end, gradient, passing = block
        w, m, v, *kept = self.stretch.slices(begin, end)
        if self.plain:
            rules.update_plain(w, gradient, m, v, self.group, step)
            return
        index = key = None
        if self.draws:
            words = rules.noise_key(self.group["seed"], int(step), self.stretch.position + begin)
            key = torch.tensor(words, dtype=torch.int32, device=self.stretch.device)
            index = None if self.native else bare(self.stretch.index(end - begin), 0, end - begin)
        rest = (self._numbers(step), index, key, self.summation, self.noisy, self.group["maximize"])
        if self._work is not None:
            self._work(w, gradient, m, v, *kept, *rest, at_once=passing)
            return
        fast = self.compiled and end - begin >= SHORT
        rule = self._compiled_rule(gradient.dtype) if fast else rules.update
        if rule is not None:
            rule(w, gradient, m, v, *kept, *rest)
        else:
            self._compile((w, gradient, m, v, *kept, *rest))

    def finish(self) -> None:
        """After the last block."""
        if self._work is not None:
            self._work.finish()

    def _numbers(self, step: float) -> torch.Tensor:
        if step not in self._scalars:
            group = self.group
            eps = max(group["eps"], rules.EPS_FLOOR)
            values = rules.scalars(float(group["lr"]), group["betas"], eps, group["weight_decay"], step)
            self._scalars[step] = torch.tensor(values, dtype=self.wide, device=self.stretch.device)
        return self._scalars[step]

    def _signature(self, gradient: torch.dtype) -> Tuple[Any, ...]:
        stretch = self.stretch
        kinds = (stretch.dtype, gradient, *stretch.kinds.items())
        return (stretch.device.type, torch.get_num_threads(), *kinds, self.summation, self.noisy, self.group["maximize"])

    def _compiled_rule(self, gradient: torch.dtype) -> Optional[rules.Rule]:
        """What updates blocks with gradients of this type; None if it is yet to be compiled."""
        if gradient not in self._rules:
            signature = self._signature(gradient)
            if signature in _failed:
                self._rules[gradient] = rules.update
            elif rules.is_compiled(signature):
                self._rules[gradient] = rules.compiled(signature)
            else:
                return None
        return self._rules[gradient]

    def _compile(self, arguments: Any) -> None:
        """The first compiled update; an eager one, with a warning, if compiling fails (before anything is changed)."""
        signature = self._signature(arguments[1].dtype)
        started = time.perf_counter()
        try:
            rules.compiled(signature)(*arguments)
            log.info("compiled the optimizer's %s update in %.1f s", self.summation, time.perf_counter() - started)
        except Exception as error:  # a missing header, a compiler that is not one, …
            rules.forget(signature)
            _failed.add(signature)
            warnings.warn(f"the optimizer goes on without compiled code ({str(error).splitlines()[0]})", stacklevel=2)
            rules.update(*arguments)


_failed: Set[Tuple[Any, ...]] = set()
