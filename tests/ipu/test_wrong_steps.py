"""Wrong steps: `check`'s trace finds each one and says which rule is broken, where, and what usually helps."""

from __future__ import annotations

import re
from typing import Any, Callable, List, NamedTuple, Tuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.ipu.examination import Finding, examine_step

from .emulator.common import Calls, options

pytestmark = pytest.mark.pod
X = torch.linspace(-1, 1, 24).reshape(6, 4)


class Doubled(torch.autograd.Function):
    """A straight-through estimator: the backward is not the derivative of the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.sign(x) * x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Linear(torch.autograd.Function):
    """A backward by hand that is right."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3.0


def loss(h: torch.Tensor) -> torch.Tensor:
    return poptorch.identity_loss(h.square(), "mean")


def staged(*ipus: int) -> Callable[..., torch.Tensor]:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for number, ipu in enumerate(ipus):
            with poptorch.Block(f"block{number}", ipu_id=ipu):
                x = torch.tanh(x) if number else torch.tanh(m.layer(x))
                if number == len(ipus) - 1:
                    return loss(x)
        return x

    return forward


def tied(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with poptorch.Block("a", ipu_id=0):
        h = m.layer(x)
    with poptorch.Block("b", ipu_id=1):
        return loss(m.layer(h))


def condition(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return loss(m.layer(x) if x.sum() > 0 else x)


def mask_read(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h = m.layer(x)
    return loss(h[h > 0])


def no_grad(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        h = m.layer(x)
    return loss(m.layer(h))


def attention(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h = m.layer(x)[None, None]
    return loss(F.scaled_dot_product_attention(h, h, h))


class Row(NamedTuple):
    """A step: its forward, what `check` says, and the options."""

    name: str
    forward: Callable[..., Any]
    rule: str
    says: str
    options: Any = None


STEPS = [
    Row("accumulation below 2F-1", staged(0, 1), "pipeline", r"gradientAccumulation \(2\).*2 \* 2 - 1 = 3", (2,)),
    Row("a path that comes back to IPU 0", staged(0, 1, 0), "stage", r"must ascend.*AutoIncrement", (5,)),
    Row("IPUs with a gap", staged(0, 2), "ipus", r"use of 3 IPUs.*power of 2: 4", (3,)),
    Row("tied weights on two pipelined IPUs", tied, "tied", r"layer\.(weight|bias).*IPUs \[0, 1\]", (3,)),
    Row("rows that do not divide", lambda m, x: loss(m.layer(x)), "batch", r"batch dimension \(6\).*= 4", (4,)),
    Row("fused attention", attention, "trace", r"scaled_dot_product_attention has no handler"),
    Row(".item()", lambda m, x: loss(m.layer(x) * x.sum().item()), "trace", r"reads a value on the host"),
    Row("if on a value", condition, "trace", r"reads a value"),
    Row("a boolean-mask read", mask_read, "trace", r"boolean mask"),
    Row("nonzero", lambda m, x: loss(m.layer(x)) + x.nonzero().sum(), "trace", r"shape depends on the data"),
    Row("a backward that is not the derivative", lambda m, x: loss(Doubled.apply(m.layer(x))), "backward",
        r"Doubled has a backward that is not the derivative.*layer\.\w+ would differ by [\d.e+-]+"),
    Row("a second loss", lambda m, x: (loss(m.layer(x)), F.mse_loss(m.layer(x), x)), "loss", r"Multiple independent losses"),
    Row("a loss that is not returned", lambda m, x: (loss(m.layer(x)), m.layer(x))[1], "loss", r"Couldn't find a loss"),
    Row("no marked loss", lambda m, x: m.layer(x).mean(), "loss", r"Couldn't find a loss"),
    Row("a loss scaled after it was marked", lambda m, x: F.mse_loss(m.layer(x), x) * 0.5, "note", r"starts at the mark"),
    Row("a loss that is no scalar", lambda m, x: poptorch.identity_loss(m.layer(x), "none"), "loss", r"scalar.*\[6, 4\]"),
    Row("an op without handler", lambda m, x: loss(torch.lerp(m.layer(x), x, 0.5)), "op", r"aten::lerp"),
    Row("bf16 in the step", lambda m, x: loss(m.layer(x).bfloat16()), "trace", r"Unsupported tensor input type.*bfloat16"),
    Row("complex numbers", lambda m, x: loss(torch.view_as_complex(m.layer(x).reshape(6, 2, 2)).abs()), "trace", r"complex"),
    Row("a tensor of the host", lambda m, x: loss(m.layer(x) + X), "trace", r"CPU tensor of shape \[6, 4\]"),
    Row("no_grad as a stop", no_grad, "note", r"no_grad\(\) does not stop the gradient"),
    Row("a loop in training", lambda m, x: loss(poptorch.for_loop(2, lambda h: [h * 2], [m.layer(x)])[0]), "trace", r"inference"),
    Row("index_put that adds", lambda m, x: loss(m.layer(x).index_put((x.long(),), x.sum(), accumulate=True)), "note",
        r"ignores accumulate"),
    Row("class weights", lambda m, x: F.cross_entropy(m.layer(x), x.argmax(1), x[0]), "trace", r"class weights"),
]


def found_in(forward: Callable[..., Any], given: Any = None, optimizer: Any = None) -> List[Finding]:
    model = Calls(forward)
    return examine_step(model, (X,), options=options(*(given or (1,))), optimizer=optimizer and optimizer(model)).findings


@pytest.mark.parametrize("row", STEPS, ids=[row.name for row in STEPS])
def test_found_by_the_trace(row: Row) -> None:
    findings = [finding for finding in found_in(row.forward, row.options) if finding.rule == row.rule]
    assert findings, f"no finding of rule {row.rule}"
    text = str(findings[0])
    assert re.search(row.says, text), text
    assert "Remedy: " in text
    if row.rule not in ("batch", "pipeline", "ipus") and "Couldn't find" not in text:
        assert re.search(r"test_wrong_steps\.py:\d+", text), text


def test_the_trace_finds_nothing_in_sound_steps() -> None:
    """The rows above fail for their fault, not for their surroundings."""
    assert found_in(lambda m, x: loss(m.layer(x))) == [] == found_in(staged(0, 1), (3,))
    assert found_in(lambda m, x: loss(Linear.apply(m.layer(x)))) == []
    assert found_in(lambda m, x: poptorch.identity_loss(F.mse_loss(m.layer(x), x) * 0.5, "none")) == []


def test_batch_norm_counters() -> None:
    model = Calls(lambda m, x: loss(m.norm(m.layer(x))))
    model.norm = nn.BatchNorm1d(4)
    text = " ".join(str(finding) for finding in examine_step(model, (X,)).findings)
    assert "norm.num_batches_tracked is no float tensor" in text and "count on the host" in text


OPTIMIZERS: List[Tuple[str, Callable[[nn.Module], Any], str, str]] = [
    ("a parameter in no group", lambda m: poptorch.optim.SGD([m.layer.weight], lr=0.1), "group", r"layer\.bias"),
    ("lr only in groups", lambda m: poptorch.optim.Adam([{"params": list(m.parameters()), "lr": 0.1}]), "lr", r"cannot change"),
    ("another model's parameters", lambda m: poptorch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), "optimizer", r"2 of the"),
    ("amsgrad", lambda m: poptorch.optim.Adam(m.parameters(), lr=0.1, amsgrad=True), "optimizer", r"amsgrad"),
    ("Adagrad", lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1), "optimizer", r"Unsupported optimizer type Adagrad"),
    ("a tensor as lr", lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1)), "optimizer", r"a number for lr"),
]


@pytest.mark.parametrize(("make", "rule", "says"), [row[1:] for row in OPTIMIZERS], ids=[row[0] for row in OPTIMIZERS])
def test_optimizers(make: Callable[[nn.Module], Any], rule: str, says: str) -> None:
    try:
        findings = found_in(lambda m, x: loss(m.layer(x)), None, make)
    except ValueError as error:  # an old torch refuses a tensor itself
        pytest.skip(str(error))
    texts = [str(finding) for finding in findings if finding.rule == rule]
    assert texts and re.search(says, texts[0]) and "Remedy: " in texts[0], findings
