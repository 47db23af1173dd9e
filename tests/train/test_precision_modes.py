"""Every precision on every kind of model from the same configuration; norms, softmax, rotary positions and loss in fp32."""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ipu_lean import _compat
from ipu_lean.config import make_config
from ipu_lean.models import build_model
from ipu_lean.nn.positions.rotary import Rotary
from ipu_lean.train.engines import make_engine
from ipu_lean.train.world import World

pytestmark = pytest.mark.pod
MODES = ("fp32", "bf16-mixed", "bf16-pure", *(("fp16-mixed",) if _compat.TORCH >= (2, 3) else ()))
MODELS: Dict[str, Any] = {
    "residual": {"stack": {"kind": "residual"}, "attention": "explicit"},
    "reversible": {"norm": "rmsnorm", "attention": "explicit"},
    "sandwich": {"sandwich": True, "stack": {"kind": "residual"}, "activation": "swiglu"},
    "reformer": {"attention": ["lsh", "local"], "lsh": {"chunk": 4}, "local": {"chunk": 4}},
    "mlp": {"kind": "mlp"},
}
VOCAB = 97


def engine_of(kind: str, precision: str) -> Any:
    model, extra = MODELS[kind], {}
    if kind == "mlp":
        model, extra = {"kind": "mlp", "width": 32, "depth": 2}, {"data": {"images": "digits", "validation": {}}}
    else:
        model = {"width": 32, "depth": 2, "heads": 2, "seq": 16, **model}
    mup = {"base_width": 16, "readout_zero_init": False}
    config = make_config(precision=precision, model=model, mup=mup, batch={"micro": 4}, optimizer={"lr": 1e-2}, **extra)
    return make_engine(build_model(config, 10 if kind == "mlp" else VOCAB), config, World())


def batch_of(kind: str) -> Any:
    draw = np.random.RandomState(0)
    if kind == "mlp":
        return draw.rand(4, 64).astype(np.float32), np.arange(4, dtype=np.int32)
    tokens = ((np.arange(17)[None] + np.arange(4)[:, None]) % 7 + 40).astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("precision", MODES)
@pytest.mark.parametrize("kind", MODELS)
def test_it_learns(kind: str, precision: str) -> None:
    engine, batch = engine_of(kind, precision), batch_of(kind)
    losses = [engine.train_step(batch).loss for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0], losses
    held = torch.bfloat16 if precision == "bf16-pure" else torch.float32
    assert {parameter.dtype for parameter in engine.model.parameters()} == {held}
    assert engine.eval_step(batch)[0] / engine.eval_step(batch)[2] < losses[0]


class Op(NamedTuple):
    """What an operation was given and gave."""

    name: str
    inputs: Tuple[torch.dtype, ...]
    output: Any


class Seen(TorchDispatchMode):
    """Every operation that reaches the dispatcher, with the types of its floating-point tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: List[Op] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = tuple(a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point() and a.dim())
        self.ops.append(Op(function.overloadpacket.__name__, given, getattr(out, "dtype", None)))
        return out

    def of(self, *names: str) -> List[Op]:
        """Those of these names."""
        return [op for op in self.ops if op.name in names]


@pytest.mark.parametrize("precision", MODES)
@pytest.mark.parametrize("kind", MODELS)
def test_what_has_to_be_wide_is_wide(kind: str, precision: str) -> None:
    engine = engine_of(kind, precision)
    with Seen() as seen:
        engine.train_step(batch_of(kind))
    wide, narrow = (torch.float32,), engine.model.parameters().__next__().dtype
    loss = seen.of("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward")
    assert loss and all(set(op.inputs) <= {torch.float32} for op in loss)
    if kind == "mlp":
        return
    products = {op.inputs[-1] for op in seen.of("mm", "addmm", "bmm")}
    half = {"bf16-mixed": torch.bfloat16, "bf16-pure": torch.bfloat16, "fp16-mixed": torch.float16}.get(precision, torch.float32)
    assert half in products, "the mode does what it says"
    rotary = seen.of("addcmul")
    assert rotary and all(set(op.inputs) == set(wide) for op in rotary)
    statistics = seen.of("rsqrt", "mean") if kind == "reversible" else seen.of("native_layer_norm")
    assert statistics
    # A layer norm of bf16 weights gets bf16 and widens inside the kernel (below); all else is given fp32.
    allowed = {torch.float32} if kind == "reversible" or precision != "bf16-pure" else {narrow}
    assert all(set(op.inputs) <= allowed for op in statistics), statistics
    softmax = seen.of("_softmax", "softmax")  # the first widens 16 bits inside its kernel as well
    assert softmax or precision == "fp32"
    assert all(set(op.inputs) <= {half, torch.float32} for op in softmax)


def test_kernels_that_are_given_16_bits_compute_in_more() -> None:
    """Sums in bf16 would stop at 256 equal terms, and a variance beside a mean of 100 would be all rounding."""
    torch.manual_seed(0)
    x = (100 + torch.randn(8, 4096)).bfloat16()
    gain, bias = torch.ones(4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    found = torch.nn.functional.layer_norm(x, (4096,), gain, bias)
    truth = torch.nn.functional.layer_norm(x.double(), (4096,))
    assert (found.double() - truth).abs().max() <= 2**-8 * truth.abs().max()
    for dtype in (torch.bfloat16, *((torch.float16,) if _compat.TORCH >= (2, 3) else ())):
        scores = torch.randn(4, 4096).mul(3).to(dtype)
        truth = scores.double().softmax(-1)
        spacing = torch.finfo(dtype).eps * truth + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert ((scores.softmax(-1).double() - truth).abs() <= spacing).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_distant_positions_are_told_apart(dtype: torch.dtype) -> None:
    """Position 1001 in 16 bits: the tables stay fp32, so only the result is rounded."""
    rotary = Rotary(2048, 16)
    x = torch.randn(1, 3, 2, 16, dtype=torch.float64)
    narrow = x.to(dtype)
    truth = rotary.double()(narrow.double(), 1000)
    found = Rotary(2048, 16)(narrow, 1000)
    assert found.dtype == dtype
    assert (found.double() - truth).abs().max() <= torch.finfo(dtype).eps * truth.abs().max()
