"""Wrong set-ups, each refused in words that hold the rule and the numbers: by the configuration (`check` reports it, and training
stops before it starts) or, for what only happens at run time, at the next call. Wrong steps are in test_wrong_steps.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.config import make_config
from ipu_lean.errors import ConfigError, RunError
from ipu_lean.ipu.check import check
from ipu_lean.optim import build_schedule
from ipu_lean.parity.start import make_start
from ipu_lean.train.engines.poptorch_engine import PopTorchEngine
from tests.parity.helpers import sections

from .emulator.common import Calls, options
from .helpers import batch_for, ipu_config, lively

pytestmark = pytest.mark.pod
X = torch.linspace(-1, 1, 24).reshape(6, 4)

# By the configuration: (name, changes, what the message says).
CONFIGURATIONS: List[Tuple[str, Dict[str, Any], str]] = [
    ("accumulation below 2F-1, a tied head back on IPU 0",
     {"batch": {"accumulation": 4}}, r"batch\.accumulation: 4.*0-1-0, which are F = 3 .*2F-1 = 5"),
    ("accumulation below 2F-1, untied",
     {"model": {"tied": False}, "batch": {"accumulation": 2}}, r"accumulation: 2.*F = 2 .*2F-1 = 3"),
    ("device iterations below F in evaluation", {"ipu": {"eval_device_iterations": 2}}, r"eval_device_iterations: 2.*F = 3"),
    ("three IPUs", {"ipu": {"layers_per_ipu": [1, 1, 2]}, "batch": {"accumulation": 9}}, r"3 IPUs .* = 3 IPUs.*power of two"),
    ("two IPUs, three replicas", {"batch": {"replicas": 3}}, r"2 IPUs a replica x 3 replicas = 6 IPUs"),
    ("layers_per_ipu that does not add up", {"ipu": {"layers_per_ipu": [2, 3]}}, r"layers placed are 5, and model\.depth is 4"),
    ("layers_per_ipu with too few entries", {"ipu": {"layers_per_ipu": [3]}}, r"layers placed are 3, and model\.depth is 4"),
    ("an IPU that holds nothing", {"ipu": {"layers_per_ipu": [2, 0, 2, 0]}, "batch": {"accumulation": 9}}, r"IPU 1 would hold"),
    ("automatic loss scaling without fp16 accumulators", {"ipu": {"loss_scaling": "auto"}}, r"accumulators are float32"),
    ("bf16 on IPU", {"precision": "bf16-mixed"}, r"an IPU has no bf16"),
    ("autocast fp16 on IPU", {"precision": "fp16-mixed"}, r"PopTorch ignores autocast"),
    ("fp16 whose rounding is not emulated", {"precision": "fp16-ipu"}, r"emulate_precision: true"),
    ("fused attention", {"model": {"attention": "fused"}}, r"model\.attention: 'fused'.*no fused attention"),
    ("a reversible engine in Python", {"memory": {"engine": "invert"}}, r"ignores Python's backward code"),
    ("tied weights on two IPUs", {"ipu": {"head_ipu": 1}}, r"matrix, which lives on IPU 0; a weight cannot be on two IPUs"),
    ("a shared layer on two IPUs", {"model": {"num_hidden_groups": 1}}, r"layer 2 shares its weights with a layer on IPU 0"),
    ("one block's layers on two IPUs",
     {"model": {"stack": {"order": "aaff"}}, "ipu": {"layers_per_ipu": [1, 3]}}, r"layers 0 and 1 in one block"),
    ("DDP beside replicas", {"train": {"processes": 2}, "batch": {"replicas": 2}}, r"one process drives all IPUs"),
    ("updates that are no whole calls", {"train": {"steps": 7}}, r"device_iterations = 2 updates.*multiple"),
    ("Adam's decay and clipping", {"optimizer": {"kind": "adam"}}, r"before it clips"),
    ("sharding over one replica", {"ipu": {"replicated_tensor_sharding": True}}, r"one replica"),
    ("shares of memory for other IPUs", {"ipu": {"matmul_proportion": [0.2, 0.2, 0.2]}}, r"3 shares for 2 IPUs"),
    ("no muP base", {"mup": {"base_width": None}}, r"muP needs a base"),
]


@pytest.mark.parametrize(("changes", "says"), [row[1:] for row in CONFIGURATIONS], ids=[row[0] for row in CONFIGURATIONS])
def test_refused_by_the_configuration(changes: Dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        ipu_config(**changes)
    text = str(error.value)
    assert re.search(says, text), text
    assert error.value.key and error.value.key.split(".")[0] in text


# What a CPU has nothing against is still wrong on an IPU, and `check` looks as an IPU would. These stop the loading anywhere.
ANYWHERE = {
    "layers_per_ipu that does not add up", "layers_per_ipu with too few entries", "fp16 whose rounding is not emulated",
    "updates that are no whole calls", "no muP base",
}
ELSEWHERE = [row for row in CONFIGURATIONS if row[0] not in ANYWHERE]


@pytest.mark.parametrize(("changes", "says"), [row[1:] for row in ELSEWHERE], ids=[row[0] for row in ELSEWHERE])
def test_check_reports_it_for_a_configuration_that_runs_on_cpu(changes: Dict[str, Any], says: str) -> None:
    result = check(ipu_config(device="cpu", **changes))
    assert (result.verdict, [finding.rule for finding in result.findings]) == ("fail", ["config"])
    assert re.search(says, result.findings[0].message), result.findings[0].message


# At the start, and at the next call.


def test_data_smaller_than_one_batch(tmp_path: Path) -> None:
    parts = sections(tmp_path, device="ipu-emulated", batch={"micro": 64}, data={"limit": 1000})
    with pytest.raises(ConfigError) as error:
        make_start(make_config(**parts), 2)
    assert re.search(r"\d+ windows of 16; one global batch needs 320", str(error.value)), error.value


@pytest.fixture
def engine() -> Any:
    config = ipu_config()
    made = PopTorchEngine(lively(config), config, build_schedule(config))
    yield made
    made.close()


def test_host_weights_edited_after_the_first_step(engine: Any) -> None:
    batch = batch_for(engine.config, 2)
    engine.train_step(batch)
    engine.sync_to_host()
    engine.train_step(batch)
    weight = engine.model.norm.weight
    weight.data.mul_(2.0)
    with pytest.raises(RunError) as error:
        engine.train_step(batch)
    assert re.search(r"`norm\.weight` was changed on the host .* sum is [\d.]+ here and [\d.]+ there", str(error.value))
    engine.sync_to_host()
    engine.model.norm.weight.data.mul_(2.0)
    with pytest.raises(RunError):
        engine.train_step(batch)


def test_weights_may_be_read_and_sent(engine: Any) -> None:
    batch = batch_for(engine.config, 2)
    engine.train_step(batch)
    assert torch.isfinite(engine.model.norm.weight).all()
    engine.train_step(batch)
    engine.detach()
    with torch.no_grad():
        engine.model.norm.weight.fill_(3.0)
    engine.attach()
    engine.train_step(batch)
    assert 2.9 < engine.sync_to_host()["norm.weight"].mean() < 3.1


def test_rows_that_are_no_whole_batch(engine: Any) -> None:
    tokens, labels = batch_for(engine.config, 2)
    with pytest.raises((RunError, AssertionError)) as error:
        engine.train_step((tokens[:-1], labels[:-1]))
    assert "19" in str(error.value) and "= 10" in str(error.value)


def test_another_shape_after_compilation(engine: Any) -> None:
    tokens, labels = batch_for(engine.config, 2)
    engine.train_step((tokens, labels))
    with pytest.raises(RunError) as error:
        engine.train_step((tokens[:, :4].copy(), labels[:, :4].copy()))
    assert "Shape mismatch" in str(error.value) and "(20, 8)" in str(error.value) and "(20, 4)" in str(error.value)


def test_tokens_of_64_bits(engine: Any) -> None:
    tokens, labels = batch_for(engine.config, 2)
    with pytest.raises(ConfigError) as error:
        engine.train_step((tokens.astype("int64"), labels))
    assert "int64" in str(error.value)


def loss(h: torch.Tensor) -> torch.Tensor:
    return poptorch.identity_loss(h.square(), "mean")


def sgd_step(**kw: Any) -> Any:
    model = Calls(lambda m, x: loss(m.layer(x)))
    groups = [{"params": list(model.parameters()), "lr": 0.1}]
    optimizer = poptorch.optim.SGD(groups, lr=0.1, **kw)
    return model, optimizer, poptorch.trainingModel(model, options=options(1), optimizer=optimizer)


def test_a_constant_attribute_changed_after_compilation() -> None:
    _, optimizer, executor = sgd_step()
    executor(X)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(poptorch.Error) as error:
        executor.setOptimizer(optimizer)
    assert "weight_decay" in str(error.value) and "0.1" in str(error.value)
    executor.destroy()


def test_two_attached_models() -> None:
    _, _, first = sgd_step()
    _, _, second = sgd_step()
    first(X)
    with pytest.raises(poptorch.Error) as error:
        second(X)
    assert "Failed to acquire 1 IPU" in str(error.value) and "detachFromDevice" in str(error.value)
    first.detachFromDevice()
    second(X)
    first.destroy(), second.destroy()


def test_accumulation_in_inference() -> None:
    """The options of training given to the inference model."""
    with pytest.raises(poptorch.Error) as error:
        poptorch.inferenceModel(nn.Linear(4, 4), options=options(8))
    assert "gradientAccumulation must be 1" in str(error.value) and "8" in str(error.value)


def test_options_changed_after_use() -> None:
    given = options(1)
    poptorch.inferenceModel(nn.Linear(4, 4), options=given)
    with pytest.raises(AttributeError):
        given.deviceIterations(2)


def test_backward_on_the_host() -> None:
    _, _, executor = sgd_step()
    with pytest.raises(poptorch.Error) as error:
        executor(X).backward()
    assert "does the backward" in str(error.value)
    executor.destroy()


def test_a_model_wrapped_twice() -> None:
    model, optimizer, executor = sgd_step()
    executor(X)
    with pytest.raises(RuntimeError):
        poptorch.trainingModel(model, options=options(1), optimizer=optimizer)
    executor.destroy()


def test_a_loss_that_is_not_finite(engine: Any) -> None:
    with torch.no_grad():
        engine.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RunError) as error:
        engine.train_step(batch_for(engine.config, 2))
    assert "the loss is nan at step 1" in str(error.value)
