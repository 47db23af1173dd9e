"""The step in the form that PopTorch gets (explicit attention, plain loss) uses operations that PopTorch 3.4 registers."""

from __future__ import annotations

import json
from importlib import resources

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ipu_lean.models import TrainStep
from tests.models.common import tiny, tokens_for

pytestmark = pytest.mark.pod

# Views, copies and casts that PopTorch's dispatcher resolves under another name in its table.
RESOLVED = {"_to_copy": "to", "alias": "view", "detach": "detach", "lift_fresh": "clone"}


class Recorder(TorchDispatchMode):
    """Names of the operations that run, and the types that they give."""

    def __init__(self):
        super().__init__()
        self.names, self.types = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        self.types |= {t.dtype for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor)}
        return out


VARIANTS = [
    {},
    {"positions": "learned", "norm": "rmsnorm", "activation": "swiglu", "tied": False},
    {"positions": "sinusoidal", "stack": {"kind": "residual"}, "activation": "silu", "sandwich": True},
    {"activation": "relu", "mup": {"base_width": 8, "output_mult": 2.0}, "dropout": 0.1, "embedding_dropout": 0.1},
    {"stack": {"coupling": "momentum"}},
    {"stack": {"coupling": "modified-momentum", "output": "gate"}},
    {"stack": {"coupling": "mean", "input": "zeros", "output": "gate-channels"}},
    {"stack": {"coupling": "affine", "input": "split"}},
    {"stack": {"exact": True}},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("chunk", [0, 5])
def test_operations_are_in_the_handler_table(variant, chunk):
    with resources.open_text("ipu_lean.ipu", "poptorch_contract.json") as file:
        contract = json.load(file)
    known = {name.split("::")[1] for name in contract["aten_handlers_registered"]}
    known |= {name.split(".")[0] for name in contract["aten_intercepted_before_decomposition"]}
    model = tiny(memory={"engine": "store"}, **variant)
    model.set_attention("explicit")
    model.set_loss(chunk, plain=True)
    tokens, labels = tokens_for(model)
    with Recorder() as record:
        TrainStep(model)(tokens, labels)
    unknown = {name for name in record.names if RESOLVED.get(name, name) not in known}
    # empty_like comes from dropout on CPU, where PopTorch has one operation for the whole.
    assert unknown <= ({"bernoulli_", "div_", "empty_like"} if "dropout" in variant else set()), unknown
    assert record.types <= {torch.float32, torch.int32, torch.int64, torch.bool}


def test_shapes_do_not_depend_on_values():
    """The same program for any tokens: traced on meta, where values do not exist."""
    from ipu_lean.models import build_meta
    from tests.models.common import config_of

    model = build_meta(config_of(attention="explicit", memory={"engine": "store"}))
    model.set_loss(5, plain=True)
    tokens = torch.zeros(2, 12, dtype=torch.int32, device="meta")
    loss, sums = TrainStep(model)(tokens, tokens)
    assert loss.shape == () and sums.shape == (3,)
