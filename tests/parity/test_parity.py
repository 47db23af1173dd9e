"""CPU and emulator, number by number: two IPUs in a pipeline, five micro-batches, two updates a call, twenty updates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

import pytest
import torch

from ipu_lean.config import Loaded
from ipu_lean.errors import ConfigError, RunError
from ipu_lean.parity import for_device, make_start
from ipu_lean.parity.commands import run_parity
from ipu_lean.parity.record import kept_calls

from .helpers import both, config_in, judged, traced

pytestmark = pytest.mark.pod
RUNS: Dict[str, Dict[str, Any]] = {
    "tied, AdamW, cosine": {"optimizer": {"weight_decay": 0.1}},
    "untied, AdamW": {"model": {"tied": False}, "optimizer": {"weight_decay": 0.1}},
    "untied, Adam with decay, linear": {
        "model": {"tied": False}, "optimizer": {"kind": "adam", "weight_decay": 0.01}, "train": {"clip": None},
        "schedule": {"kind": "linear"},
    },
    "tied, SGD with momentum and decay": {"optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}},
}


@pytest.mark.parametrize("name", RUNS)
def test_fp32(tmp_path: Path, name: str) -> None:
    found = both(config_in(tmp_path, **RUNS[name]), 20)
    assert found.verdict == "pass", found.diagnosis
    losses, weights, gradients = (judged(found, kind) for kind in ("loss", "weight", "gradient"))
    assert len(losses) == 20 and max(row.relative for row in losses) <= 1e-6
    assert {row.step for row in weights} == set(range(2, 21, 2))
    # The key's bias has next to no gradient: it is left out, or allowed what rounding does to it. Nothing else is.
    key = "key.linear.bias"
    assert max(row.relative for row in weights if not row.name.endswith(key)) <= 1e-5
    assert all(name.endswith(key) for name in found.named("left out"))
    assert gradients and not found.named("muted") and not found.named("zero")
    assert len(judged(found, "activation")) == 1 + 2 * 2 + 2


def test_a_key_bias_without_rotary_positions_has_no_gradient(tmp_path: Path) -> None:
    found = both(config_in(tmp_path, model={"positions": "learned", "stack": {"kind": "residual"}}), 4)
    assert found.verdict == "pass", found.diagnosis
    keys = [f"layers.blocks.{layer}.branches.0.attention.key.linear.bias" for layer in range(2)]
    assert found.named("zero") == keys and found.named("left out") == keys


def test_shared_layers_and_replicas(tmp_path: Path) -> None:
    config = config_in(tmp_path, model={"num_hidden_groups": 1}, batch={"replicas": 2}, ipu={"layers_per_ipu": None})
    found = both(config, 4)
    assert found.verdict == "pass", found.diagnosis
    assert any("(visit 2)" in row.name for row in judged(found, "activation"))


def test_fp16_with_stochastic_rounding(tmp_path: Path) -> None:
    """Loss within 1 % over 50 updates."""
    steps = {"steps": 50, "eval_every": 2, "save_every": 2}
    config = config_in(tmp_path, device="ipu-emulated", precision="fp16-ipu", train=steps,
                       ipu={"emulate_precision": True},
                       model={"tied": False}, batch={"accumulation": 3})
    found = both(config, 50)
    assert found.verdict == "pass", found.diagnosis
    rows = judged(found, "loss")
    assert len(rows) == 50 and 0.0 < max(row.relative for row in rows) <= 1e-2


def test_muted_gradients_are_not_taken_for_agreement(tmp_path: Path) -> None:
    """As initialised, muP's zero query lets no gradient reach the key."""
    config = config_in(tmp_path)
    start = make_start(config, 2, as_initialised=True)
    found = both(config, 2, start)
    assert start.drawn == [] and found.verdict == "inconclusive"
    assert {name.split(".")[6] for name in found.named("muted")} == {"key"}
    drawn = make_start(config, 2)
    assert [name.split(".")[6] for name in drawn.drawn] == ["query", "query"]
    changed = {name for name in start.weights if not torch.equal(start.weights[name], drawn.weights[name])}
    assert changed == set(drawn.drawn)


def test_the_start_is_the_same_every_time(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    torch.manual_seed(1)
    one = make_start(config, 2)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)
    assert make_start(config, 2).digest() == one.digest()
    assert make_start(config_in(tmp_path, seed=4), 2).digest() != one.digest()


@pytest.mark.parametrize("key", ["dropout", "attention_dropout", "embedding_dropout"])
def test_dropout_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_start(config_in(tmp_path, model={key: 0.1}), 2)
    assert f"model.{key}=0" in str(error.value)


def test_a_run_that_breaks_off_says_so(tmp_path: Path) -> None:
    config = config_in(tmp_path, optimizer={"kind": "sgd", "lr": 1e30}, train={"clip": None})
    with pytest.raises(RunError):
        run_parity(Loaded(config, {}, ""), steps=4, out=str(tmp_path / "run"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 1) and "step" in summary["error"]


def test_updates_are_whole_calls(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with pytest.raises(ConfigError) as error:
        traced(config, "cpu", make_start(config, 3))
    assert "multiple" in str(error.value)


def test_precision_of_the_reference(tmp_path: Path) -> None:
    half = config_in(tmp_path, device="ipu-emulated", precision="fp16-ipu", ipu={"emulate_precision": True})
    assert for_device(half, "cpu").precision == "fp32" and for_device(half, "ipu-emulated").precision == "fp16-ipu"
    with pytest.raises(ConfigError):
        for_device(config_in(tmp_path, precision="bf16-mixed"), "ipu-emulated")


def test_which_weights_are_kept() -> None:
    assert kept_calls(10, 1000) == list(range(1, 11))
    assert kept_calls(10, 10**9) == [1, 2, 4, 8, 10] and kept_calls(1, 10**9) == [1]
