"""What is known about single ops: losses, refused arguments, randomness, and how to get a result's shape."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Optional, Set, Tuple

import torch

from .errors import Error
from .structures import flatten, map_tensors

if TYPE_CHECKING:
    from .recorder import Recorder

ALLOWED = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
                     torch.float64})
# Losses that reach the dispatcher whole (LossOps.cpp); the others are caught as Python functions, see intercept.py.
LOSSES = frozenset({"nll_loss_forward", "nll_loss2d_forward", "mse_loss", "smooth_l1_loss", "binary_cross_entropy",
                    "soft_margin_loss"})
_BATCH_NORM = frozenset({"native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"})


def check_dtype(tensor: torch.Tensor, recorder: Optional[Recorder] = None) -> None:
    """bf16, complex and the like do not exist on the IPU (dispatch_tracer/Tensor.cpp:47-68)."""
    if tensor.dtype in ALLOWED:
        return
    message = f"Unsupported tensor input type from pytorch: {tensor.dtype}"
    raise recorder.fail(message) if recorder is not None else Error(message)


def single_precision(kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """float64 becomes float32 silently (poptorch/source/Utils.cpp:141-151)."""
    if kwargs.get("dtype") is torch.float64:
        return dict(kwargs, dtype=torch.float32)
    return kwargs


def is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def argument(func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any], name: str) -> Any:
    """The value of a schema argument by name, its default when it was not passed, None when the op has no such argument."""
    for index, entry in enumerate(func._schema.arguments):
        if entry.name == name:
            if index < len(args):
                return args[index]
            return kwargs.get(name, entry.default_value)
    return None


def mutated(func: Any, name: str, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> List[torch.Tensor]:
    """The tensors that a call writes into."""
    found: Set[str] = {entry.name for entry in func._schema.arguments
                       if entry.alias_info is not None and entry.alias_info.is_write}
    if name in _BATCH_NORM and argument(func, args, kwargs, "training") is not False:
        found |= {"running_mean", "running_var"}  # not marked in torch 2.0's schema
    return [tensor for entry in found for tensor in flatten(argument(func, args, kwargs, entry))]


def run_on_shapes(func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    """The op on meta tensors; where torch has no shape rule, on zeros, keeping only the shapes."""
    try:
        return func(*args, **kwargs)
    except NotImplementedError:
        pass
    moved = {"device": torch.device("cpu")} if "device" in kwargs else {}

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")  # while tracing, the default is the device

    result = func(*map_tensors(args, zeros), **dict(map_tensors(kwargs, zeros), **moved))
    return map_tensors(result, lambda tensor: torch.empty_like(tensor, device="meta"))


def refused_arguments(name: str, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Optional[str]:
    """Why PopTorch refuses an op that it has a handler for, or None."""

    def value(key: str) -> Any:
        return argument(func, args, kwargs, key)

    if name in ("nll_loss_forward", "nll_loss2d_forward") and value("weight") is not None:
        return "class weights are unsupported in nll_loss and cross_entropy (LossOps.cpp:101,152)"
    if name == "topk" and value("sorted") is False:
        return "topk(sorted=False) is unsupported (supported_ops.rst:197)"
    if name == "embedding" and (value("scale_grad_by_freq") or value("sparse")):
        return "scale_grad_by_freq and sparse are unsupported in embedding"
    if name == "bincount" and not value("minlength"):
        return "bincount needs minlength, which it takes as the exact size (RegisterMetaOps.cpp.inc:40-47)"
    if name == "native_layer_norm" and (value("weight") is None) != (value("bias") is None):
        return "layer_norm with a weight but no bias, or the reverse, is unsupported"
    if name == "div" and value("rounding_mode") is not None:
        return "div's rounding_mode is ignored, its handler reads two inputs (AtenHandlers.gen.cpp:147): divide, then floor"
    if name == "sort" and value("stable") and func._schema.name.endswith("argsort"):
        return "argsort(stable=...) is unsupported"
    return None
