"""PopTorch's own ops (python/ops.py). On plain CPU they compute or do nothing; while tracing they become nodes of the graph."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch

from . import enums, kernels
from .errors import createPoptorchError
from .intercept import composite
from .log import logger
from .structures import map_tensors
from .tracestate import current_recorder


def _require_tensor(value: Any, what: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise createPoptorchError(f"{what} takes a torch.tensor argument, {type(value)} is not supported")


def _annotate(name: str, tensor: torch.Tensor, *extra: Any) -> torch.Tensor:
    recorder = current_recorder()
    if recorder is None:
        return tensor
    return composite(recorder, kernels.identity, (tensor, *extra), {}, name="poptorch::" + name,
                     shape=lambda x, *_: x.view_as(x))


def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Mark `x` as the loss: "sum", "mean" or "none" (AssertionError otherwise). Off the IPU it only reduces."""
    assert reduction in ("sum", "mean", "none"), f"Unsupported reduction type {reduction!r}"
    recorder = current_recorder()
    if recorder is None:
        return kernels.identity_loss(x, reduction)
    return composite(recorder, kernels.identity_loss, (x, reduction), {}, name="poptorch::identity_loss", loss=True,
                     shape=lambda value, how: value.view_as(value) if how == "none" else value.sum().to(value.dtype))


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Keep these tensors for the backward pass; what lies between is computed again. Same nesting out; ValueError for a
    non-tensor."""
    if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
        return type(tensors[0])(_checkpoint(item) for item in tensors[0])
    kept = tuple(_checkpoint(item) for item in tensors)
    return kept[0] if len(kept) == 1 else kept


def _checkpoint(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError("recomputationCheckpoint: all inputs must be tensors")
    return _annotate("recomputation_checkpoint", tensor)


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Share of an IPU's memory that the op which made `tensor` may use for temporaries (default 0.6)."""
    _require_tensor(tensor, "set_available_memory")
    return _annotate("set_available_memory", tensor, float(available_memory_proportion))


def serializedMatMul(lhs: torch.Tensor, rhs: torch.Tensor, mode: enums.MatMulSerializationMode, factor: int = 0,
                     keep_precision: bool = False) -> torch.Tensor:
    """`lhs @ rhs`, cut along the dimension that `mode` names into `factor` parts."""
    assert isinstance(keep_precision, bool), "keep_precision must be a bool"
    assert isinstance(factor, int), "factor must be an int"
    assert isinstance(mode, enums.MatMulSerializationMode), f"{mode!r} is not a poptorch.MatMulSerializationMode"
    return _annotate("set_matmul_serialization", torch.matmul(lhs, rhs), mode.value, factor, keep_precision)


def nop(tensor: torch.Tensor) -> torch.Tensor:
    _require_tensor(tensor, "nop")
    return _annotate("nop", tensor)


def ipu_print_tensor(tensor: torch.Tensor, title: str = "", print_gradient: bool = True, summarise_threshold: int = 1000,
                     edge_items: int = 3, max_line_width: int = 80, digits: int = 4, float_format: str = "auto",
                     separator: str = ", ", open_bracket: str = "(", close_bracket: str = ")") -> torch.Tensor:
    """Returns `tensor`. The emulator does not write its values anywhere."""
    _require_tensor(tensor, "ipu_print_tensor")
    if current_recorder() is not None:
        logger.warning("the emulator does not print tensors (title %r)", title)
    return _annotate("ipu_print_tensor", tensor)


def set_overlap_for_input(input_tensors: Any, mode: enums.OverlapMode) -> Any:
    return _overlap(input_tensors, mode, "set_overlap_for_input")


def set_overlap_for_output(output_tensors: Any, mode: enums.OverlapMode) -> Any:
    return _overlap(output_tensors, mode, "set_overlap_for_output")


def _overlap(tensors: Any, mode: enums.OverlapMode, name: str) -> Any:
    if not isinstance(tensors, (torch.Tensor, tuple, list, dict)):
        raise createPoptorchError(f"{name} takes tensors, {type(tensors)} is not supported")
    return map_tensors(tensors, lambda tensor: _annotate(name, tensor, mode.value))


def dynamic_slice(tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """A slice of fixed `size` whose `start` is a tensor; every `step`-th entry."""
    _require_tensor(tensor, "dynamic_slice")
    _require_tensor(start, "dynamic_slice's start")
    for name, value in (("dim", dim), ("size", size), ("step", step)):
        if not isinstance(value, int):
            raise createPoptorchError(f"dynamic_slice: {name} must be an integer")
    return _own_op("dynamic_slice", kernels.dynamic_slice, (tensor, dim, start, size, step))


def dynamic_update(input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int) -> torch.Tensor:
    """A copy of `input` with `size` entries along `dim`, from the tensor `start`, taken from `src`."""
    for name, value in (("input", input), ("src", src), ("start", start)):
        _require_tensor(value, f"dynamic_update's {name}")
    for name, number in (("dim", dim), ("size", size)):
        if not isinstance(number, int):
            raise createPoptorchError(f"dynamic_update: {name} must be an integer")
    if input.dim() != src.dim() or input.dtype != src.dtype:
        raise createPoptorchError(f"dynamic_update: input and src differ in rank or type ({input.dim()}, {input.dtype} and "
                                  f"{src.dim()}, {src.dtype})")
    return _own_op("dynamic_update", kernels.dynamic_update, (input, src, dim, start, size))


def _own_op(name: str, kernel: Callable[..., Any], args: Tuple[Any, ...]) -> Any:
    recorder = current_recorder()
    return kernel(*args) if recorder is None else composite(recorder, kernel, args, {}, name="poptorch::" + name)


def for_loop(count: int, body: Callable[..., Any], inputs: List[torch.Tensor]) -> List[torch.Tensor]:
    """Run `body` `count` times on the device (inference only). Off the IPU the body runs once whatever `count` is
    (RegisterAtenOverloads.cpp:743-755). ValueError unless `inputs` is a list of tensors."""
    if not isinstance(inputs, list) or not all(isinstance(tensor, torch.Tensor) for tensor in inputs):
        raise ValueError("poptorch.for_loop takes its inputs as a list of tensors")
    recorder = current_recorder()
    if recorder is not None:
        recorder.inference_only("for_loop")
    values = [tensor.clone() for tensor in inputs]
    for _ in range(count if recorder is not None else 1):
        result = body(*values)
        values = list(result) if isinstance(result, (list, tuple)) else [result]
    return values


def cond(condition: torch.Tensor, then_body: Callable[..., Any], then_inps: List[torch.Tensor], else_body: Callable[..., Any],
         else_inps: List[torch.Tensor]) -> List[torch.Tensor]:
    """`then_body` or `else_body` by a tensor of one bool (inference only). ValueError unless the inputs are lists."""
    if not isinstance(then_inps, list) or not isinstance(else_inps, list):
        raise ValueError("poptorch.cond takes then_inps and else_inps as lists")

    def run(body: Callable[..., Any], inputs: List[torch.Tensor]) -> List[torch.Tensor]:
        result = body(*inputs)
        return [result] if isinstance(result, torch.Tensor) else [*result]

    recorder = current_recorder()
    if recorder is None:
        return run(then_body, then_inps) if condition else run(else_body, else_inps)
    recorder.inference_only("cond")
    pairs = zip(run(then_body, then_inps), run(else_body, else_inps))
    return [torch.where(condition.reshape(()).bool(), one, other) for one, other in pairs]


def custom_op(inputs: Any, name: str, domain: str, domain_version: int, example_outputs: Any,
              attributes: Optional[Dict[str, Union[float, int, str, list, tuple]]] = None) -> List[torch.Tensor]:
    """An op written in C++ for PopART. Off the IPU: zeros shaped like `example_outputs`; in a trace the emulator refuses it."""
    for key, value in (attributes or {}).items():
        if not isinstance(key, str) or not isinstance(value, (float, int, str, list, tuple)):
            raise ValueError(f"custom_op: attribute {key!r} must be a string with a float, int, string, list or tuple")
    recorder = current_recorder()
    if recorder is not None:
        raise recorder.fail(f"custom op {domain}.{name}: there is no compiled op in the emulator")
    return [torch.zeros_like(output) for output in example_outputs]


class CPU:
    """A part of an inference model that runs on the host. The emulator refuses it in a trace; off the IPU it is the layer."""

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        self._layer_to_call = layer_to_call
        self._ID = ID
        if isinstance(layer_to_call, torch.nn.Module):
            layer_to_call.requires_grad_(False)

    def execute(self) -> None:
        """PopTorch's callback; nothing calls it here."""

    def registerPersistentData(self) -> None:
        """PopTorch's callback; nothing calls it here."""

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        recorder = current_recorder()
        if recorder is not None:
            recorder.inference_only("CPU")
            raise recorder.fail(f"poptorch.CPU op {self._ID!r} is not emulated")
        return self._layer_to_call(*input, **kwargs)
