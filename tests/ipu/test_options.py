"""The `ipu:` section as PopTorch's options: every key arrives, and training and inference get their own numbers."""

from __future__ import annotations

from typing import Any, Dict

import pytest
import torch

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.ipu import describe_options, make_options
from tests.ipu.helpers import ipu_config

pytestmark = pytest.mark.pod


def made(**changes: Any) -> Dict[str, Dict[str, Any]]:
    pair = make_options(ipu_config(**changes), poptorch)
    return {"train": pair.train.toDict(), "eval": pair.eval.toDict()}


def test_batching_of_training_and_of_inference() -> None:
    found = made(batch={"replicas": 2, "accumulation": 6})
    train, inference = found["train"], found["eval"]
    assert (train["device_iterations"], train["gradient_accumulation"], train["replication_factor"]) == (2, 6, 2)
    # F = 3 stages want 3 device iterations; accumulation in inference is an error in PopTorch.
    assert (inference["device_iterations"], inference["gradient_accumulation"], inference["replication_factor"]) == (3, 1, 2)
    assert train["accumulation_and_replication_reduction_type"] == poptorch.ReductionType.Mean
    assert train["output_mode"] == inference["output_mode"] == poptorch.OutputMode.All.value
    assert train["random_seed"] == 7


def test_evaluation_may_ask_for_more_iterations() -> None:
    assert made(ipu={"eval_device_iterations": 9})["eval"]["device_iterations"] == 9
    assert made(batch={"device_iterations": 8}, train={"eval_every": 8, "save_every": 8})["eval"]["device_iterations"] == 8


CASES = [
    ({"execution": "pipelined"}, "execution_mode", 0),
    ({"execution": "sharded"}, "execution_mode", 1),
    ({"partials": "half"}, "partialsTypeMatMuls", "half"),
    ({"partials": "float"}, "partialsTypeMatMuls", "float"),
    ({"matmul_proportion": 0.2}, "available_memory_proportion", {0: 0.2, 1: 0.2}),
    ({"matmul_proportion": [0.1, 0.3]}, "available_memory_proportion", {0: 0.1, 1: 0.3}),
    ({"stochastic_rounding": True}, "enableStochasticRounding", True),
    ({}, "enableStochasticRounding", False),
    ({"executable_cache": "cache"}, "cachePath", "cache"),
    ({"synthetic_data": True}, "syntheticDataMode", 2),
    ({"offline_target": "ipu21"}, "ipu_version", 21),
    ({"offline_target": "ipu2"}, "connection_type", poptorch.ConnectionType.Never.value),
    ({"engine_options": {"target.syncReplicasIndependently": "true"}}, "engineOptions",
     {"target.syncReplicasIndependently": "true"}),
    ({"optimizer_state_offchip": True}, "location_optimizer", {"onChip": 0, "useReplicatedTensorSharding": 0}),
]


@pytest.mark.parametrize("section, key, value", CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_each_key_arrives(section: Dict[str, Any], key: str, value: Any) -> None:
    assert made(ipu=section)["train"][key] == value


def test_replicated_tensor_sharding() -> None:
    found = made(ipu={"replicated_tensor_sharding": True}, batch={"replicas": 2})["train"]
    assert found["location_optimizer"] == {"onChip": 1, "useReplicatedTensorSharding": 1}


def test_what_is_not_asked_for_is_left_to_poptorch() -> None:
    found = made(ipu={"recompute_checkpoint_every_layer": False})
    keys = ("autoRecomputation", "engineOptions", "location_optimizer", "cachePath", "syntheticDataMode", "ipu_version")
    assert not [key for key in keys if key in found["train"] or key in found["eval"]]
    assert found["train"]["anchored_tensors"] == {}


def test_one_ipu_recomputes_only_if_told() -> None:
    one = {"layers_per_ipu": [4]}
    assert made(ipu=one)["train"]["autoRecomputation"] == 4
    assert "autoRecomputation" not in made(ipu={**one, "recompute_checkpoint_every_layer": False})["train"]
    assert made(ipu={"execution": "sharded"})["train"]["autoRecomputation"] == 4
    assert "autoRecomputation" not in made()["train"]  # a pipeline does so by itself
    assert "autoRecomputation" not in made(ipu=one)["eval"]


def test_fp16_turns_rounding_on_in_training_only() -> None:
    found = made(precision="fp16-ipu", ipu={"emulate_precision": True, "loss_scaling": "auto"})
    assert found["train"]["enableStochasticRounding"] is True and found["eval"]["enableStochasticRounding"] is False
    assert found["train"]["automaticLossScalingSettings.enabled"] is True
    assert "automaticLossScalingSettings.enabled" not in found["eval"]


def test_the_hosts_random_state_is_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    make_options(ipu_config(), poptorch)
    assert torch.equal(before, torch.get_rng_state())


def test_description_has_a_line_for_each_option_of_both() -> None:
    text = describe_options(make_options(ipu_config(), poptorch))
    lines = text.splitlines()
    assert "train.device_iterations = 2" in lines and "eval.device_iterations = 3" in lines
    assert all(line.startswith(("train.", "eval.")) and " = " in line for line in lines)
