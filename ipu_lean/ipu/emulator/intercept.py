"""What is caught above torch's dispatcher: losses that torch would split, host reads, `detach`, factories without device."""
from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Dict, Iterator, Tuple

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from . import kernels
from .errors import Error
from .oprules import run_on_shapes
from .recorder import META, Recorder
from .structures import flatten, map_tensors
from .tracestate import current_recorder

# The losses that carry PopTorch's mark (supported_ops.rst:381-395) and reach torch's dispatcher in pieces.
_LOSS_NAMES = ("l1_loss", "kl_div", "poisson_nll_loss", "hinge_embedding_loss", "binary_cross_entropy_with_logits",
               "cosine_embedding_loss", "margin_ranking_loss", "triplet_margin_loss", "ctc_loss")
_LOSSES = {getattr(space, name) for space in (F, torch) for name in _LOSS_NAMES if hasattr(space, name)}
_DETACH = {torch.Tensor.detach, torch.detach}
_DETACH_IN_PLACE = {torch.Tensor.detach_, torch.detach_}
_READS = {torch.Tensor.tolist: "tolist", torch.Tensor.numpy: "numpy", torch.Tensor.__array__: "numpy",
          torch.Tensor.__repr__: "print", torch.Tensor.__format__: "format"}
_ARGSORT = {torch.argsort, torch.Tensor.argsort}
# python/_poplar_executor.py:47-58: these are forced onto the IPU when no device is given; torch.eye, for one, is not.
_FACTORIES = ("arange", "empty", "full", "full_like", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm",
              "range", "zeros", "zeros_like")


def composite(recorder: Recorder, function: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any], *, name: str,
              loss: bool = False, shape: Any = None, random: bool = False) -> Any:
    """Record a Python function as one node. `shape` computes the result on shapes where that differs from the function."""
    args, kwargs = recorder._only_traced(name, args, kwargs)
    recorder.paused = True
    try:
        result = run_on_shapes(shape or function, args, kwargs)
    finally:
        recorder.paused = False
    return recorder.record(function, args, kwargs, result, name=name, loss=loss, random=random)


class FunctionMode(TorchFunctionMode):
    """Sees calls of torch's Python functions."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        try:
            hash(func)
        except TypeError:
            return func(*args, **kwargs)
        if recorder.paused or not any(tensor.is_meta for tensor in flatten([args, kwargs])):
            return func(*args, **kwargs)
        if func in _DETACH:
            recorder.detaching = True
            try:
                return func(*args, **kwargs)
            finally:
                recorder.detaching = False
        if func in _DETACH_IN_PLACE:
            return recorder.record(torch.ops.aten.detach.default, args, {}, func(*args), name="aten::detach")
        if func in _LOSSES:
            return composite(recorder, func, args, kwargs, name="aten::" + func.__name__, loss=True)
        if func in _READS:
            raise recorder.fail(f"Tensor.{_READS[func]} reads values on the host, which is impossible in a static graph")
        return self._special(func, args, kwargs)

    def _special(self, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        recorder = self.recorder
        if func is F.scaled_dot_product_attention:
            raise recorder.fail("scaled_dot_product_attention has no handler: write attention with matmul and softmax")
        if func in _ARGSORT and "stable" in kwargs:
            raise recorder.fail("argsort(stable=...) is lowered wrongly: its handler reads the flag as the dimension "
                                "(ReduceOps.cpp:182-206); use sort(stable=True)")
        if func is F.one_hot:
            classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
            if classes < 1:
                raise recorder.fail("one_hot needs num_classes (supported_ops.rst:366)")
            tensor = args[0] if args else kwargs["tensor"]
            return composite(recorder, kernels.one_hot, (tensor, classes), {}, name="aten::one_hot",
                             shape=lambda x, n: torch.empty((*x.shape, n), dtype=x.dtype, device=META))
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            return func(args[0], _index(args[1]), *args[2:])
        if func is torch.Tensor.new_tensor:
            data = args[1] if len(args) > 1 else kwargs["data"]
            return recorder.constant(torch.as_tensor(data, dtype=kwargs.get("dtype", args[0].dtype)))
        return func(*args, **kwargs)


def _index(index: Any) -> Any:
    """Lists in an index become constants of the graph; torch would make a tensor without values of them."""
    if isinstance(index, tuple):
        return tuple(_index(item) for item in index)
    return torch.tensor(index) if isinstance(index, list) else index


@contextlib.contextmanager
def factories_on_device(recorder: Recorder) -> Iterator[None]:
    """While tracing, `torch.zeros(…)` and its like without a device make tensors of the graph; `torch.tensor` a constant."""
    saved: Dict[str, Any] = {name: getattr(torch, name) for name in (*_FACTORIES, "tensor", "normal")}

    def forced(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            ours = current_recorder() is recorder and "device" not in kwargs
            if ours and all(tensor.is_meta for tensor in flatten([args, kwargs])):
                kwargs["device"] = META
            return function(*args, **kwargs)

        return wrapper

    def tensor(data: Any, **kwargs: Any) -> Any:
        if current_recorder() is not recorder:
            return saved["tensor"](data, **kwargs)
        device = kwargs.pop("device", META)
        made = saved["tensor"](data, **kwargs)
        return recorder.constant(made) if torch.device(device).type == "meta" else made.to(device)

    def normal(*args: Any, **kwargs: Any) -> Any:
        on_device = current_recorder() is recorder and not flatten([args, kwargs]) and "device" not in kwargs
        return saved["normal"](*args, **(dict(kwargs, device=META) if on_device else kwargs))

    validate = torch.distributions.Distribution._validate_args
    try:
        for name in _FACTORIES:
            setattr(torch, name, forced(saved[name]))
        torch.tensor, torch.normal = tensor, normal
        torch.distributions.Distribution.set_default_validate_args(False)
        yield
    finally:
        for name, function in saved.items():
            setattr(torch, name, function)
        torch.distributions.Distribution.set_default_validate_args(validate)


def fresh_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A shape-only twin of the same strides, float64 as float32; Error for a type the IPU lacks or for no elements."""
    if tensor.numel() == 0:
        raise Error(f"Zero-sized tensors are unsupported (got shape {list(tensor.shape)})")
    dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=META)


def plain(structure: Any) -> Any:
    """Tensors of a result, detached, for outputs that never were on the device."""
    return map_tensors(structure, lambda tensor: tensor.detach())
