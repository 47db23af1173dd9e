"""`poptorch.optim` (python/optim.py): torch's optimizers plus what PopART adds. Their Python `step()` never runs on the IPU.

An attribute is variable after compilation exactly when it was passed to the constructor (optim.py:50-64), lr included: lr given
only inside parameter groups is constant.
"""
from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from .log import logger

_ACCUM_TYPES = (torch.float16, torch.float32)


class VariableAttributes:
    """Which attributes may change after compilation; `optimizer.variable_attrs`."""

    def __init__(self, variable_attributes: List[str], allowed_attributes: List[str]) -> None:
        self._variable = list(variable_attributes)
        self._allowed = allowed_attributes

    def isConstant(self, attr: str) -> bool:
        return attr not in self._variable

    def markAsConstant(self, attr: str) -> None:
        self._check(attr)
        self._variable = [name for name in self._variable if name != attr]

    def markAsVariable(self, attr: str) -> None:
        self._check(attr)
        self._variable.append(attr)

    def _check(self, attr: str) -> None:
        assert attr in self._allowed, f"Unknown attribute {attr}, allowed values: {self._allowed}"


class Optimizer:
    """State on the device, mirrored as `ipu_state` and `ipu_param` in `state_dict()` beside torch's own entries."""

    _extra: Tuple[str, ...] = ()

    def __init__(self) -> None:
        self._state_dict: Dict[str, Any] = {"ipu_state": None, "ipu_param": None}
        self.ipu_state_is_dirty = False
        self.host_state_is_dirty = False

    def state_dict(self) -> Dict[str, Any]:
        return self.get_state_dict()

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """RuntimeError for an empty dict or one without the IPU entries: torch's own states cannot be loaded."""
        self.set_state_dict(state)
        ours = {key: value for key, value in state.items() if key not in ("ipu_state", "ipu_param")}
        torch.optim.Optimizer.load_state_dict(self, ours)  # type: ignore[arg-type]

    def get_state_dict(self) -> Dict[str, Any]:
        ours = {key: self._state_dict.get(key) for key in ("ipu_state", "ipu_param")}
        return {**ours, **torch.optim.Optimizer.state_dict(self)}  # type: ignore[arg-type]

    def set_state_dict(self, state: Dict[str, Any]) -> None:
        if not state:
            raise RuntimeError("Cannot load optimizer state dictionary because it is empty.")
        if "ipu_state" not in state or "ipu_param" not in state:
            raise RuntimeError("Only IPU optimizer states can be loaded onto the IPU.")
        self._state_dict = dict(state)
        self.ipu_state_is_dirty = True
        self.host_state_is_dirty = False

    def has_state(self) -> bool:
        return self._state_dict.get("ipu_state") is not None and self._state_dict.get("ipu_param") is not None

    def _finish(self, given: Dict[str, Any], types: Dict[str, Optional[torch.dtype]], **values: Any) -> None:
        """Set the optimizer-wide attributes, and note which constructor arguments were given."""
        for name, dtype in types.items():
            dtype = torch.float32 if dtype is None else dtype
            assert dtype in _ACCUM_TYPES, f"{name}: accumulation types must be torch.float32 or torch.float16, got {dtype}"
            setattr(self, name, dtype)
        for name, value in values.items():
            setattr(self, name, value)
        self._extra = (*types, *values)
        variable = [name for name, value in given.items() if value is not None and name not in ("self", "__class__")]
        self.variable_attrs = VariableAttributes(variable, [*self.defaults, *self._child_vars])  # type: ignore[attr-defined]

    def __getstate__(self) -> Dict[str, Any]:
        state = torch.optim.Optimizer.__getstate__(self)  # type: ignore[arg-type]
        state.update({name: getattr(self, name) for name in (*self._extra, "_extra", "variable_attrs", "_state_dict")})
        state.update(ipu_state_is_dirty=self.has_state(), host_state_is_dirty=False)
        return state


def _parent(given: Dict[str, Any], own: List[str]) -> Dict[str, Any]:
    """The arguments for torch's constructor: those that were given and are torch's."""
    skip = {"self", "__class__", *own}
    return {name: value for name, value in given.items() if name not in skip and value is not None}


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


class SGD(Optimizer, torch.optim.SGD):
    """SGD with two variants: separate accumulator and velocity (default), or one tensor for both."""

    _child_vars = ["loss_scaling"]
    _child_only = _child_vars + ["velocity_scaling", "use_combined_accum", "accum_type", "velocity_accum_type", "max_grad_norm"]
    _group_vars = ["lr", "momentum", "dampening", "weight_decay", "nesterov", "velocity_scaling"]

    def __init__(self, params: Any, lr: float, momentum: Optional[float] = None, dampening: Optional[float] = None,
                 weight_decay: Optional[float] = None, nesterov: Optional[bool] = None, maximize: Optional[bool] = None,
                 foreach: Optional[bool] = None, differentiable: Optional[bool] = None, loss_scaling: Optional[float] = None,
                 velocity_scaling: Optional[float] = None, use_combined_accum: Optional[bool] = None,
                 accum_type: Optional[torch.dtype] = None, velocity_accum_type: Optional[torch.dtype] = None,
                 max_grad_norm: Optional[float] = None) -> None:
        given = dict(locals())
        Optimizer.__init__(self)
        torch.optim.SGD.__init__(self, **_parent(given, self._child_only))
        combined = bool(use_combined_accum)
        if velocity_scaling is not None and not combined:
            logger.warning("velocity_scaling is ignored unless use_combined_accum=True")
        if combined:
            self.defaults["velocity_scaling"] = _or(velocity_scaling, 1.0)
            for group in self.param_groups:
                group.setdefault("velocity_scaling", self.defaults["velocity_scaling"])
        self._finish(given, {"accum_type": accum_type, "velocity_accum_type": velocity_accum_type},
                     loss_scaling=_or(loss_scaling, 1.0), use_combined_accum=combined, max_grad_norm=_or(max_grad_norm, math.inf))


class Adam(Optimizer, torch.optim.Adam):
    """Adam with L2 regularisation: weight decay is added to the gradient."""

    _child_vars = ["loss_scaling"]
    _child_only = _child_vars + ["accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type",
                                 "max_grad_norm"]
    _group_vars = ["lr", "betas", "eps", "weight_decay", "amsgrad"]

    def __init__(self, params: Any, lr: Optional[float] = None, betas: Optional[Tuple[float, float]] = None,
                 eps: Optional[float] = None, weight_decay: Optional[float] = None, amsgrad: Optional[bool] = None,
                 foreach: Optional[bool] = None, maximize: Optional[bool] = None, capturable: Optional[bool] = None,
                 differentiable: Optional[bool] = None, fused: Optional[bool] = None, loss_scaling: Optional[float] = None,
                 accum_type: Optional[torch.dtype] = None, first_order_momentum_accum_type: Optional[torch.dtype] = None,
                 second_order_momentum_accum_type: Optional[torch.dtype] = None, max_grad_norm: Optional[float] = None) -> None:
        given = dict(locals())
        Optimizer.__init__(self)
        torch.optim.Adam.__init__(self, **_parent(given, self._child_only))
        self._finish(given, {"accum_type": accum_type, "first_order_momentum_accum_type": first_order_momentum_accum_type,
                             "second_order_momentum_accum_type": second_order_momentum_accum_type},
                     loss_scaling=_or(loss_scaling, 1.0), max_grad_norm=_or(max_grad_norm, math.inf))


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay, scaled by lr."""

    _child_vars = ["loss_scaling"]
    _child_only = _child_vars + ["bias_correction", "accum_type", "first_order_momentum_accum_type",
                                 "second_order_momentum_accum_type", "max_grad_norm"]
    _group_vars = ["lr", "betas", "weight_decay", "eps", "amsgrad"]

    def __init__(self, params: Any, lr: Optional[float] = None, betas: Optional[Tuple[float, float]] = None,
                 eps: Optional[float] = None, weight_decay: Optional[float] = None, amsgrad: Optional[bool] = None,
                 maximize: Optional[bool] = None, foreach: Optional[bool] = None, capturable: Optional[bool] = None,
                 differentiable: Optional[bool] = None, fused: Optional[bool] = None, loss_scaling: Optional[float] = None,
                 bias_correction: Optional[bool] = None, accum_type: Optional[torch.dtype] = None,
                 first_order_momentum_accum_type: Optional[torch.dtype] = None,
                 second_order_momentum_accum_type: Optional[torch.dtype] = None, max_grad_norm: Optional[float] = None) -> None:
        given = dict(locals())
        Optimizer.__init__(self)
        torch.optim.AdamW.__init__(self, **_parent(given, self._child_only))
        self._finish(given, {"accum_type": accum_type, "first_order_momentum_accum_type": first_order_momentum_accum_type,
                             "second_order_momentum_accum_type": second_order_momentum_accum_type},
                     loss_scaling=_or(loss_scaling, 1.0), bias_correction=_or(bias_correction, True),
                     max_grad_norm=_or(max_grad_norm, math.inf))


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop; `use_tf_variant` puts eps inside the square root and starts the square average at one. It has no clipping."""

    _child_vars = ["loss_scaling"]
    _child_only = _child_vars + ["accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type",
                                 "use_tf_variant"]
    _group_vars = ["lr", "momentum", "weight_decay", "alpha", "eps", "centered"]

    def __init__(self, params: Any, lr: Optional[float] = None, alpha: Optional[float] = None, eps: Optional[float] = None,
                 weight_decay: Optional[float] = None, momentum: Optional[float] = None, centered: Optional[bool] = None,
                 foreach: Optional[bool] = None, maximize: Optional[bool] = None, differentiable: Optional[bool] = None,
                 loss_scaling: Optional[float] = None, accum_type: Optional[torch.dtype] = None,
                 first_order_momentum_accum_type: Optional[torch.dtype] = None,
                 second_order_momentum_accum_type: Optional[torch.dtype] = None, use_tf_variant: Optional[bool] = None) -> None:
        given = dict(locals())
        Optimizer.__init__(self)
        torch.optim.RMSprop.__init__(self, **_parent(given, self._child_only))
        self._finish(given, {"accum_type": accum_type, "first_order_momentum_accum_type": first_order_momentum_accum_type,
                             "second_order_momentum_accum_type": second_order_momentum_accum_type},
                     loss_scaling=_or(loss_scaling, 1.0), use_tf_variant=_or(use_tf_variant, False))


class LAMB(Optimizer, torch.optim.Optimizer):
    """LAMB (You et al., 2020, https://arxiv.org/abs/1904.00962): Adam's update scaled by |w| / |update| for each tensor."""

    _child_vars = ["loss_scaling"]
    _child_only = _child_vars + ["bias_correction", "accum_type", "first_order_momentum_accum_type",
                                 "second_order_momentum_accum_type"]
    _group_vars = ["lr", "weight_decay", "betas", "eps", "max_weight_norm"]

    def __init__(self, params: Any, lr: Optional[float] = None, betas: Optional[Tuple[float, float]] = None,
                 eps: Optional[float] = None, weight_decay: Optional[float] = None, bias_correction: Optional[bool] = None,
                 loss_scaling: Optional[float] = None, max_weight_norm: Optional[float] = None,
                 accum_type: Optional[torch.dtype] = None, first_order_momentum_accum_type: Optional[torch.dtype] = None,
                 second_order_momentum_accum_type: Optional[torch.dtype] = None) -> None:
        given = dict(locals())
        Optimizer.__init__(self)
        defaults = {"lr": _or(lr, 1e-3), "betas": _or(betas, (0.9, 0.999)), "eps": _or(eps, 1e-8),
                    "weight_decay": _or(weight_decay, 1e-2), "max_weight_norm": _or(max_weight_norm, 65500.0)}
        torch.optim.Optimizer.__init__(self, params, defaults)
        self._finish(given, {"accum_type": accum_type, "first_order_momentum_accum_type": first_order_momentum_accum_type,
                             "second_order_momentum_accum_type": second_order_momentum_accum_type},
                     loss_scaling=_or(loss_scaling, 1.0), bias_correction=_or(bias_correction, True),
                     max_weight_norm=defaults["max_weight_norm"])

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:
        """One update on the host, for models that were never put on an IPU."""
        from .optimdevice import lamb_update

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    lamb_update(parameter, parameter.grad, self.state[parameter], group, self.bias_correction)
        return loss
