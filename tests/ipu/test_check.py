"""`check`: shipped and small configurations, the report, exit codes; models of any size on shapes alone."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any, Dict, Tuple

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.cli import main
from ipu_lean.config import load, make_config
from ipu_lean.errors import VerdictFailed
from ipu_lean.ipu import contract
from ipu_lean.ipu.check import check, format_check, run_check
from ipu_lean.ipu.examination import Finding, examine_step
from ipu_lean.ipu.remedies import remedy

from .emulator.common import Calls, Classifier, options, tokens
from .helpers import ipu_config

pytestmark = pytest.mark.pod
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
X = torch.linspace(-1, 1, 24).reshape(6, 4)


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_shipped_configurations(name: str) -> None:
    """All trace and place; those for GPUs are refused for their precision, and for Python's backward code, first."""
    config = load(str(CONFIGS / name)).config
    result = check(config)
    if config.precision not in ("fp32", "fp16-ipu"):
        reason = "autocast" if config.precision == "fp16-mixed" else "no bf16"
        assert [finding.rule for finding in result.findings] == ["config"] and reason in result.findings[0].message
        memory = config.memory.model_copy(update={"engine": "auto"})
        config = config.model_copy(update={"precision": "fp32", "memory": memory})
        result = check(config)
    if config.memory.ffn_chunk:
        assert [finding.rule for finding in result.findings] == ["config"] and "ffn_chunk" in result.findings[0].message
        result = check(config.model_copy(update={"memory": config.memory.model_copy(update={"ffn_chunk": 0})}))
    assert result.verdict == "pass", format_check(result)
    assert all(row["handler"] != "none" for row in result.found.ops)


VARIANTS: Dict[str, Dict[str, Any]] = {
    "untied": {"model": {"tied": False}},
    "residual": {"model": {"stack": {"kind": "residual"}}},
    "gated, rmsnorm": {"model": {"activation": "swiglu", "norm": "rmsnorm", "bias": False}},
    "sandwich, learned positions": {"model": {"sandwich": True, "positions": "learned"}},
    "sinusoidal": {"model": {"positions": "sinusoidal"}},
    "aaff": {"model": {"stack": {"order": "aaff"}}},
    "shared": {"model": {"num_hidden_groups": 2}},
    "dropout": {"model": {"dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1}},
    "chunked loss": {"memory": {"loss_chunk": 4}},
    "sharded": {"ipu": {"execution": "sharded"}},
    "replicas": {"batch": {"replicas": 2}},
    "half": {"precision": "fp16-ipu", "ipu": {"emulate_precision": True}},
    "automatic loss scaling": {"precision": "fp16-ipu", "ipu": {"emulate_precision": True, "loss_scaling": "auto"}},
    "sgd": {"optimizer": {"kind": "sgd", "momentum": 0.9}},
    "standard": {"mup": {"parametrization": "standard", "base_width": None}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    result = check(ipu_config(**VARIANTS[name]))
    assert result.verdict == "pass", format_check(result)
    assert "lr" in result.optimizer[0].split("after compilation: ")[1].split(", ")


def test_numbers_of_the_report() -> None:
    result = check(ipu_config())
    text = format_check(result)
    assert (result.found.forward_stages, result.found.ipus) == (3, 2)
    assert "2 IPUs, 3 forward stages: training needs accumulation >= 2F-1 = 5 (it is 5)" in text
    assert "2 micro x 5 accumulation x 1 replicas x 2 device iterations = 20 rows of 8 tokens, 2 updates" in text
    assert "2 micro x 1 replicas x 3 device iterations = 6 rows" in text
    assert [(row["stage"], row["ipu"]) for row in result.found.stages] == [(1, 0), (2, 1), (3, 0)]
    rows = {row["op"]: row for row in result.found.ops}
    assert rows["aten::_softmax"]["count"] == 4  # one a layer
    assert rows["aten::_softmax"]["handler"] == contract.handlers()["aten::_softmax"].split("/")[-1]
    assert rows["aten::triu"]["dtypes"] == ["float32"] and rows["poptorch::identity_loss"]["handler"] == "PopTorch's own"


def test_a_large_model_needs_no_memory() -> None:
    """Five billion parameters, which would be 20 GB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = make_config(
        device="ipu", precision="fp16-ipu", model={"width": 4096, "depth": 24, "seq": 512, "tied": False},
        mup={"base_width": 256}, batch={"micro": 1, "accumulation": 64}, data={"tokenizer": {"kind": "bpe", "vocab": 5000}},
        ipu={"layers_per_ipu": [-1] * 8},
    )
    result = check(config)
    assert result.verdict == "pass" and result.found.ipus == 8 and result.found.forward_stages == 8
    assert "layer21-layer23" in result.placement
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


def test_the_model_is_left_as_it_was() -> None:
    model = Classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    found = examine_step(model, tokens(6), options=options(3), evaluation=(tokens(4), options(1, 2)))
    assert found.findings == [] and not model.training and type(model) is Classifier
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    calls = [name for name, parameter in model.named_parameters() if type(parameter) is not nn.Parameter]
    assert calls == []


def test_findings_of_training_and_evaluation_are_told_apart() -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> Any:
        h = torch.lerp(m.layer(x), x, 0.5)
        if not m.training:
            h = torch.logcumsumexp(h, 0)
        return poptorch.identity_loss(h, "mean")

    found = examine_step(Calls(forward), (X,), options=options(1), evaluation=((X,), options(1)))
    phases = {finding.message.split("[")[1].rstrip("]"): finding.phase for finding in found.findings}
    assert phases == {"aten::lerp": "both", "aten::logcumsumexp": "evaluation"}


def test_parameters_that_the_loss_does_not_reach_are_noted() -> None:
    model = Calls(lambda m, x: poptorch.identity_loss(m.layer(x).detach() + m.scale, "mean"))
    model.scale = nn.Parameter(torch.ones(4))
    found = examine_step(model, (X,), options=options(1))
    assert found.findings == [] and "2 trainable parameters do not influence the loss: layer.weight" in " ".join(found.notes)


def test_a_finding_in_words() -> None:
    finding = Finding("op", "Unsupported ops found in compiled model: [aten::lerp]", "training", "layer.0", "model.py", 12)
    assert str(finding) == (
        "[op] Unsupported ops found in compiled model: [aten::lerp] (module `layer.0`, model.py:12). Remedy: write it with "
        "operations from PopTorch's table, or compute it on the host and feed it as an input."
    )
    assert finding.as_dict()["remedy"] == finding.remedy and finding.as_dict()["line"] == 12
    assert remedy("nothing", "nothing known") == ""


def test_a_backward_by_hand_in_our_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared with the traced derivative on real weights; one that is right is only noted."""
    from ipu_lean.nn import FeedForward

    from .test_wrong_steps import Doubled, Linear

    true = FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: Linear.apply(true(self, x)))
    result = check(ipu_config())
    assert result.verdict == "pass" and "ignores the backward of autograd.Function Linear" in " ".join(result.found.notes)
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: Doubled.apply(true(self, x)))
    result = check(ipu_config())
    assert [finding.rule for finding in result.findings] == ["backward"] and "Doubled" in str(result.findings[0])


# The command.


def call(capsys: Any, *words: Any) -> Tuple[int, Dict[str, Any], str, str]:
    code = main([*map(str, words), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]), out, err


def test_the_command(capsys: Any) -> None:
    code, summary, text, _ = call(capsys, "check", CONFIGS / "tiny_ipu.yaml")
    assert (code, summary["verdict"], summary["exit_code"], summary["command"]) == (0, "pass", 0, "check")
    assert "verdict: pass" in text and "table" not in summary
    assert summary["metrics"]["forward_stages"] == 3 and summary["metrics"]["findings"] == []


def test_a_failed_check(capsys: Any) -> None:
    code, summary, text, err = call(capsys, "check", CONFIGS / "tiny_cpu.yaml", "ipu.layers_per_ipu=[1, 1]")
    assert (code, summary["verdict"], summary["exit_code"]) == (4, "fail", 4)
    assert "check found 1 thing that would not work on IPUs" in err and "2F-1 = 5" in err and "verdict: fail" in text
    assert summary["metrics"]["findings"][0]["rule"] == "config"
    with pytest.raises(VerdictFailed) as error:
        run_check(load(str(CONFIGS / "tiny_cpu.yaml"), ["ipu.layers_per_ipu=[1, 1]"]))
    assert error.value.summary["verdict"] == "fail" and error.value.exit_code == 4


def test_a_violation_in_our_own_model_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that uses an op without handler: module path and source line."""
    from ipu_lean.nn import FeedForward

    true = FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: torch.lerp(true(self, x), x, 0.5))
    result = check(ipu_config())
    text = str(result.findings[0])
    assert result.verdict == "fail" and "aten::lerp" in text and "test_check.py:" in text
    assert "module `model.layers.blocks.0.branches.1.feed_forward`" in text


def test_the_example_of_the_page(capsys: Any) -> None:
    page = (CONFIGS.parent / "docs" / "check.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    model = Classifier()
    both = tokens(6)
    exec(code, {"step": model, "tokens": both[0], "labels": both[1]})
    assert capsys.readouterr().out == ""  # nothing to find
    exec(code, {"step": Calls(lambda m, x, y: x.float().mean()), "tokens": both[0], "labels": both[1]})
    assert "Couldn't find a loss" in capsys.readouterr().out
