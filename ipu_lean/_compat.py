"""What differs between torch 2.0.1 (the one PopTorch 3.4 asserts) and newer releases, in one place.

Nothing else in the package asks for torch's version.
"""
from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import shutil
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import nn

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def autocast_state(device_type: str) -> Tuple[bool, torch.dtype]:
    """(enabled, dtype) of autocast on `device_type` ("cpu" or "cuda") right now."""
    if TORCH >= (2, 4):
        return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    if device_type == "cpu":
        return torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()
    return torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()


def _never() -> bool:
    return False


compiling: Callable[[], bool] = getattr(getattr(torch, "compiler", None), "is_compiling", _never)
"""Whether torch.compile is tracing this code (never before torch 2.1, which offers no way to ask)."""


def grad_scaler(device_type: str, **options: Any) -> Any:
    """torch's gradient scaler for fp16; on CPU only from torch 2.3 on (raises AttributeError before)."""
    if TORCH >= (2, 3):
        return torch.amp.GradScaler(device_type, **options)
    if device_type != "cuda":
        raise AttributeError("torch before 2.3 has no gradient scaler for CPU")
    return torch.cuda.amp.GradScaler(**options)


def load_weights(path: str, map_location: Any = "cpu") -> Any:
    """`torch.load` of plain tensors and containers only: no code from the file is run."""
    return torch.load(path, map_location=map_location, weights_only=True)


def load_state_assign(module: nn.Module, state: Dict[str, torch.Tensor]) -> None:
    """`load_state_dict(assign=True)`: torch 2.0.1 has no such argument, so the parameters are replaced by hand there."""
    if TORCH >= (2, 1):
        module.load_state_dict(state, assign=True)
        return
    names: List[str] = [name for name, _ in module.named_parameters()]
    for name in names:
        owner, _, leaf = name.rpartition(".")
        old = module.get_parameter(name)
        setattr(module.get_submodule(owner), leaf, nn.Parameter(state[name], requires_grad=old.requires_grad))
    module.load_state_dict(state)


def parameter_hook_after_accumulation(parameter: nn.Parameter, hook: Any) -> Any:
    """Run `hook(parameter)` when its gradient is complete; torch 2.0.1 has no such hook (raises AttributeError)."""
    return parameter.register_post_accumulate_grad_hook(hook)


def data_parallel(module: nn.Module, device_ids: Optional[List[int]]) -> nn.Module:
    """DDP around `module` that exchanges gradients only: buffers are the same everywhere. torch 2.13 renamed that option."""
    wrapper = nn.parallel.DistributedDataParallel
    names = inspect.signature(wrapper.__init__).parameters
    quiet = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    return wrapper(module, device_ids=device_ids, gradient_as_bucket_view=True, **{quiet: False})


def reduce_scatter(output: torch.Tensor, source: torch.Tensor) -> None:
    """Each process gets its part of the sum over processes; torch 2.13 renamed it."""
    import torch.distributed as dist

    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(output, source)


def fused_adam(decoupled: bool) -> Any:
    """torch's kernel that makes Adam's (or AdamW's) whole update in one pass over CPU tensors; None before torch 2.4."""
    return getattr(torch, "_fused_adamw_" if decoupled else "_fused_adam_", None) if TORCH >= (2, 4) else None


def why_not_compiled(device_type: str) -> Optional[str]:
    """Why torch.compile cannot be used for elementwise code on `device_type`, in words; None where it should work.

    Before torch 2.4 it neither vectorises bf16 nor reinterprets bits on CPU.
    """
    if TORCH < (2, 4):
        return f"torch {torch.__version__} compiles 16-bit arithmetic badly (2.4 or newer is needed)"
    return no_compiler(device_type)


def no_compiler(device_type: str) -> Optional[str]:
    """What torch.compile's generated code needs on "cpu" or "cuda" and does not find, or None."""
    if device_type != "cpu":
        return None if importlib.util.find_spec("triton") is not None else "there is no Triton"
    given = os.environ.get("CXX")
    names = [given.split()[0]] if given else ["g++", "clang++", "cl"]
    if any(shutil.which(name) for name in names):
        return None
    return f"there is no C++ compiler (CXX is {given})" if given else "there is no C++ compiler (g++ or clang++)"


def mixes_types() -> bool:
    """Whether addcmul_ and addcdiv_ take tensors of several floating-point types; torch 2.0.1's fail an internal check."""
    one = torch.ones(1)
    try:
        one.bfloat16().addcmul_(one, one).addcdiv_(one, one)
    except RuntimeError:
        return False
    return True


@functools.lru_cache(maxsize=1)
def overwrites() -> bool:
    """Whether `baddbmm_(beta=0)` ignores what was there before; torch 2.0.1's small products multiply it by 0, so NaN stays."""
    one = torch.ones(1, 1, 1)
    return bool(torch.full((1, 1, 1), float("nan")).baddbmm_(one, one, beta=0).isfinite().all())


def compile_elementwise(function: Any) -> Any:
    """`torch.compile` of elementwise code on contiguous tensors of one length, which may change from call to call.

    The caller answers for types, device and threads: where torch allows it, they are not checked again at every call.
    """
    unchecked = getattr(torch.compiler, "skip_all_guards_unsafe", None) if hasattr(torch, "compiler") else None
    options = {} if unchecked is None else {"options": {"guard_filter_fn": unchecked}}
    return torch.compile(function, dynamic=True, fullgraph=True, **options)


def decay_towards(average: torch.Tensor, value: torch.Tensor, beta: float) -> None:
    """average = beta average + (1 - beta) value, in place, rounded as this torch's AdamW rounds it."""
    if TORCH >= (2, 1):
        average.lerp_(value, 1 - beta)
    else:
        average.mul_(beta).add_(value, alpha=1 - beta)


def increment_versions(tensors: List[torch.Tensor]) -> None:
    """Tell autograd that these were changed in place, where their memory was written past it: a backward pass that saved one of
    them is refused then, as after any other change in place.
    """
    try:
        torch.autograd.graph.increment_version(tensors)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):  # before torch 2.1 there is none, and some after it take only one tensor
        for tensor in tensors:
            tensor.detach().unsqueeze(0)[:0].zero_()  # a view shares the counter
