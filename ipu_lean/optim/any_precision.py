"""AnyPrecisionAdamW: AdamW whose weights and state may all have 16 bits, without losing what rounding takes away.

The arguments are torchdistx's, and so are its numbers with `numerics="published"`; by default its defects are mended (see
any_precision_rules.py). Bytes a parameter with bf16 weights, gradients and moments: 10 with `kahan` or `split`, 8 with
`stochastic` or `none`; fp32 AdamW has 16.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import torch

from ipu_lean import _compat
from ipu_lean.errors import ConfigError
from ipu_lean.optim import any_precision_options as options
from ipu_lean.optim import any_precision_published as published
from ipu_lean.optim import native
from ipu_lean.optim.any_precision_buffers import Stretch, begins_of, stretches
from ipu_lean.optim.any_precision_walk import Walk

C_FROM, COMPILE_FROM = 1 << 17, 1 << 21
"""Elements from which compiling pays, in C (a second, once a machine) and by torch.compile (some seconds in each process)."""


class AnyPrecisionAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with a type for each of its states.

    Args:
        params: parameters, or groups of them; every option below except the last two may differ between groups. bf16, fp16, fp32
            and fp64 weights. lr may be a 0-dim tensor.
        use_kahan_summation: None: for 16-bit weights; False and True as in torchdistx. momentum_dtype: of exp_avg.
        variance_dtype: of exp_avg_sq; None: what `variance` says. compensation_buffer_dtype: of the Kahan compensation.
        summation: "kahan", "split", "stochastic", "none", or "auto": what `use_kahan_summation` says. split and stochastic are
            for bf16 weights; fp32 weights in the same group, which lose nothing worth keeping, are updated plainly.
        variance: "auto": bf16 while beta2 <= 0.996, else fp32, because rounding to nearest keeps a bf16 variance from falling
            beyond that; "bf16", "fp32", or "stochastic": bf16, rounded by chance, for any beta2.
        maximize: follow the gradient instead of going against it. seed: of stochastic rounding, an integer.
        numerics: "correct", or "published" for torchdistx's rule bit for bit.
        compiled: True, False, or None: where it can be and pays. Both ways round alike.
        flatten: make parameters views of one buffer where that is safe.

    State of each parameter: step (float32 scalar), exp_avg, exp_avg_sq, and compensation (kahan), or lower and lowest (split;
    uint8). It keeps its types through `state_dict` and `load_state_dict`.

    Raises:
        ConfigError: an option out of range, or a pair that contradicts itself; at a step: sparse or complex gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Any = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        use_kahan_summation: Optional[bool] = None,
        momentum_dtype: torch.dtype = torch.float32,
        variance_dtype: Optional[torch.dtype] = None,
        compensation_buffer_dtype: torch.dtype = torch.bfloat16,
        *,
        summation: str = "auto",
        variance: str = "auto",
        maximize: bool = False,
        seed: int = 0,
        numerics: str = "correct",
        compiled: Optional[bool] = None,
        flatten: bool = True,
    ) -> None:
        self.compiled, self.flatten = compiled, flatten
        self._plan: Optional[List[List[Stretch]]] = None
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "use_kahan_summation": use_kahan_summation,
            "momentum_dtype": momentum_dtype,
            "variance_dtype": variance_dtype,
            "compensation_buffer_dtype": compensation_buffer_dtype,
            "summation": summation,
            "variance": variance,
            "maximize": maximize,
            "seed": seed,
            "numerics": numerics,
        }
        super().__init__(params, defaults)
        self._lay_out()

    # -- groups and state --------------------------------------------------------------------------------------------------
    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """As torch's; the group's options are checked."""
        super().add_param_group(param_group)
        options.check(self.param_groups[-1])
        self._plan = None

    def __getstate__(self) -> Dict[str, Any]:
        """What copies and pickles have."""
        return {**super().__getstate__(), "compiled": self.compiled, "flatten": self.flatten}  # type: ignore[no-untyped-call]

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("compiled", None)
        self.__dict__.setdefault("flatten", True)
        self._plan = None
        for group in self.param_groups:
            for key in options.KEYS:
                group.setdefault(key, self.defaults[key])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's, but state keeps the values and types it was saved with: torch's own casts it to the parameter's type."""
        plan = self._plan
        super().load_state_dict(state_dict)  # type: ignore[arg-type]
        self._plan = plan  # weights have not moved
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            for parameter, index in zip(group["params"], saved["params"]):
                entry = state_dict["state"].get(index)
                if entry is not None:
                    self.state[parameter] = {key: _copied(value, parameter) for key, value in entry.items()}
        for group in self.param_groups:
            options.check(group)

    def _lay_out(self) -> None:
        """Put the parameters into buffers. Their values and their state's are taken from where they are."""
        own = {s.weights.untyped_storage().data_ptr() for part in self._plan or [] for s in part if s.weights is not None}
        self._plan, position = [], 0
        for group in self.param_groups:
            flatten = self.flatten and group["numerics"] == "correct"

            def kinds(dtype: torch.dtype, group: Dict[str, Any] = group) -> Dict[str, torch.dtype]:
                return options.state_kinds(group, dtype)

            self._plan.append(stretches(group["params"], kinds, position, flatten, own))
            position += begins_of(group["params"])[-1]
        self._total = sum(stretch.size for part in self._plan for stretch in part)
        self._where = {
            id(parameter): (number, stretch, place)
            for number, part in enumerate(self._plan)
            for stretch in part
            for place, parameter in enumerate(stretch.parameters)
        }

    # -- a step ------------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """One update from the gradients there are; parameters without one stay as they are. Returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        options.check_gradients(self.param_groups)
        self.settle()
        assert self._plan is not None
        for group, part in zip(self.param_groups, self._plan):
            if group["numerics"] == "published":
                published.update_group(group, self.state)
                continue
            for stretch in part:
                self._advance(group, stretch, range(len(stretch.parameters)))
        return loss

    def settle(self) -> None:
        """See to it that parameters and options are still those that the buffers were made for."""
        if self._plan is None or not all(self._fits(*pair) for pair in zip(self.param_groups, self._plan)):
            self._lay_out()

    @torch.no_grad()
    def step_of(self, parameters: Sequence[torch.Tensor]) -> None:
        """What `step` does to these parameters, and nothing to others; after `settle`, with nothing moved since."""
        assert self._plan is not None
        places: Dict[int, Tuple[int, Stretch, List[int]]] = {}
        for parameter in parameters:
            number, stretch, place = self._where[id(parameter)]
            places.setdefault(id(stretch), (number, stretch, []))[2].append(place)
        for number, stretch, some in places.values():
            group = self.param_groups[number]
            chosen = {**group, "params": [stretch.parameters[place] for place in some]}
            options.check_gradients([chosen])
            if group["numerics"] == "published":
                published.update_group(chosen, self.state)
            else:
                self._advance(group, stretch, sorted(some))

    @staticmethod
    def _fits(group: Dict[str, Any], part: List[Stretch]) -> bool:
        """Whether parameters and options are still those that the buffers were made for."""
        return all(stretch.in_place() and stretch.kinds == options.state_kinds(group, stretch.dtype) for stretch in part)

    def _advance(self, group: Dict[str, Any], stretch: Stretch, places: Sequence[int]) -> None:
        """Update the parameters at these places of one stretch, in runs of those that have made the same number of steps."""
        runs: Dict[float, List[Tuple[int, torch.Tensor]]] = {}
        steps, kinds, moved = [], set(), []
        for place in places:
            parameter, begin = stretch.parameters[place], stretch.begins[place]
            gradient = parameter.grad
            if gradient is None or parameter.numel() == 0:
                continue
            state = self.state[parameter]
            stretch.adopt(place, state)
            step = state["step"]
            steps.append(step)
            moved.append(parameter)
            kinds.add(gradient.dtype)
            runs.setdefault(step.item() + 1, []).append((begin, gradient))
        if not runs:
            return
        walk = Walk(group, stretch, kinds, self._compiles(group, stretch))
        for step, pieces in runs.items():
            for block in stretch.blocks(pieces, walk.longest):
                walk.update(block, step)
        walk.finish()
        stretch.finish()
        torch._foreach_add_(steps, [torch.ones_like(steps[0])] * len(steps))  # a number would be made a tensor for each
        _compat.increment_versions(moved)

    def _compiles(self, group: Dict[str, Any], stretch: Stretch) -> bool:
        """Whether this stretch is updated by compiled code: in C where that suits, else by torch.compile."""
        if self.compiled is False:
            return False
        total = self._total
        if (self.compiled or total >= C_FROM) and native.usable(
            stretch.device, stretch.dtype, stretch.kinds, group["maximize"]
        ):
            return True
        if self.compiled is None and total < COMPILE_FROM:
            return False
        problem = _compat.why_not_compiled(stretch.device.type)
        if self.compiled and problem is not None:
            raise ConfigError(f"the optimizer cannot be compiled: {problem}", key="compiled", suggestion="leave it out")
        return problem is None


def _copied(value: Any, parameter: torch.Tensor) -> Any:
    """A copy on the parameter's device, in its own type; counters stay on the host."""
    if not torch.is_tensor(value):
        return value
    return value.detach().clone() if value.dim() == 0 and parameter.dim() else value.detach().to(parameter.device, copy=True)
