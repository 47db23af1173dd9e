"""`examine`: all that is wrong with a step at once, and what PopTorch would accept without doing what it says."""
from __future__ import annotations

from typing import Any, List

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.ipu.emulator.examine import Report, examine

from .common import Calls, Classifier, options, tokens

pytestmark = pytest.mark.pod
X = torch.linspace(-1, 1, 24).reshape(6, 4)


def rules(report: Report) -> List[str]:
    return [violation.rule for violation in report.violations]


def notes(report: Report) -> str:
    return " ".join(str(note) for note in report.notes)


def test_a_sound_step() -> None:
    model = Classifier()
    report = examine(model, tokens(12), options=options(3, 2), optimizer=poptorch.optim.AdamW(model.parameters(), lr=0.1))
    assert (report.violations, report.notes, report.forward_stages, report.ipus) == ([], [], 1, 1)
    assert {"aten::embedding", "aten::native_layer_norm", "aten::nll_loss_forward"} <= {row["op"] for row in report.ops}
    assert type(model) is Classifier and type(model.head.weight) is nn.Parameter


def test_several_things_at_once() -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> Any:
        with poptorch.Block("a", ipu_id=0):
            h = torch.lerp(m.layer(x), x, 0.5)
        with poptorch.Block("b", ipu_id=1):
            h = m.layer(h)
        with poptorch.Block("c", ipu_id=2):
            return poptorch.identity_loss(h, "mean"), F.mse_loss(h, h.detach() + 1)

    report = examine(Calls(forward), (X,), options=options(4))
    assert set(rules(report)) == {"batch", "loss", "op", "tied", "pipeline", "ipus"}
    text = "\n".join(str(violation) for violation in report.violations)
    assert "test_examine.py:" in text and "2 * 3 - 1 = 5" in text and "= 4" in text
    assert report.forward_stages == 3


def test_what_cannot_be_traced_at_all() -> None:
    report = examine(Calls(lambda m, x: m.layer(x) * x.sum().item()), (X,))
    assert rules(report) == ["trace"] and "test_examine.py:" in str(report.violations[0]) and report.trace is None
    assert rules(examine(Calls(lambda m, x: m.layer(x)), (X,), options=options(2), training=False)) == ["accumulation"]
    assert rules(examine(Classifier(), (X,))) == ["arguments"]


def test_optimizer_rules() -> None:
    model, other = Classifier(), Classifier()
    optimizer = poptorch.optim.Adam([{"params": other.head.parameters(), "lr": 0.1}], amsgrad=True)
    report = examine(model, tokens(2), optimizer=optimizer)
    assert rules(report) == ["optimizer", "optimizer"]
    assert "no optimizer group" in notes(report) and "lr was not passed" in notes(report)


@pytest.mark.parametrize(("after", "noted"), [(lambda loss: loss * 0.5, True), (lambda loss: loss, False),
                                              (lambda loss: loss.detach() * 2, False)])
def test_a_value_after_the_mark(after: Any, noted: bool) -> None:
    report = examine(Calls(lambda m, x: (m.layer(x), after(F.mse_loss(m.layer(x), x)), F.mse_loss(m.layer(x), x))[:2]), (X,))
    assert ("starts at the mark" in notes(report)) is noted


def test_session_options_must_exist() -> None:
    """popart_compiler/source/include/popart_compiler/SessionOptionsImpl.hpp:43."""
    made = options()
    made._Popart.set("autoRecomputation", 3).set("enableStableNorm", 1).set("autoRecompute", 3)
    made.enableExecutableCaching("cache").enableSyntheticData(False)
    made.Precision.setPartialsType(torch.half)
    messages = [str(violation) for violation in examine(Classifier(), tokens(2), options=made).violations]
    assert messages == ["Unknown uint64 option enableStableNorm: it is a bool option", "Unknown uint64 option autoRecompute"]


def test_automatic_loss_scaling_needs_float16() -> None:
    """popart transforms/automaticlossscaling.cpp:277; it also makes loss_scaling variable (_optimizer_attributes.py:156)."""
    made = options()
    made.Training.setAutomaticLossScaling(True)
    assert rules(examine(Classifier(), tokens(2), options=made)) == ["loss scaling"]
    half = Classifier().half()
    optimizer = poptorch.optim.Adam(half.parameters(), lr=0.1)
    assert rules(examine(half, tokens(2), options=made, optimizer=optimizer)) == []
    assert not optimizer.variable_attrs.isConstant("loss_scaling")


def test_overlapped_io() -> None:
    """popart_compiler/source/Compiler.cpp:1766-1785."""
    mode = poptorch.OverlapMode.OverlapAccumulationLoop
    model = Calls(lambda m, x: poptorch.identity_loss(m.layer(poptorch.set_overlap_for_input(x, mode)), "mean"))
    made = options(mode=poptorch.OutputMode.Final)
    assert "PipelinedExecution" in str(examine(model, (X,), options=made).violations[0])
    made.setExecutionStrategy(poptorch.ShardedExecution())
    assert "IO tiles" in str(examine(model, (X,), options=made).violations[0])
    made.TensorLocations.numIOTiles(64)
    assert "OutputMode" in str(examine(model, (X,), options=made).violations[0])
    assert rules(examine(model, (X,), options=made.outputMode(poptorch.OutputMode.Sum))) == []


def test_counters_are_noted() -> None:
    """JitDispatch.cpp:109-120: an integer buffer cannot be updated; BatchNorm's own counter is one."""
    model = Calls(lambda m, x: poptorch.identity_loss(m.norm(m.layer(x)), "mean"))
    model.norm = nn.BatchNorm1d(4)
    report = examine(model, (X,))
    assert report.violations == [] and "norm.num_batches_tracked is no float tensor" in notes(report)
    assert model.norm.num_batches_tracked.item() == 0
