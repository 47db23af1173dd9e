"""A network's numbers follow from the configuration alone: parameters are those of built models, IPU by IPU."""

from __future__ import annotations

import random
from typing import Any, Dict

import pytest

from ipu_lean.config import make_config
from ipu_lean.data import expected_vocab
from ipu_lean.errors import ConfigError
from ipu_lean.ipu.placement import rows_of
from ipu_lean.ipu.plan import make_plan
from ipu_lean.ipu.plan.memory import boundary_bytes, ipu_memory, layer_bytes, stage_memory
from ipu_lean.ipu.plan.network import as_ipu, network_of, workload_of
from ipu_lean.ipu.traced import traced_plan
from ipu_lean.models import build_meta
from tests.ipu.helpers import VOCAB, ipu_config
from tests.ipu.plan.placements import random_config

pytestmark = pytest.mark.pod


@pytest.mark.parametrize("seed", range(10))
def test_parameters_of_every_stage_are_those_of_the_built_model(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(8):
        config = random_config(draw)
        wanted: Dict[int, int] = {}
        for row in rows_of(build_meta(config, VOCAB), config):
            wanted[row.stage] = wanted.get(row.stage, 0) + row.parameters
        found = {row.stage.index: row.parameters for row in stage_memory(workload_of(config))}
        assert {stage: count for stage, count in found.items() if count} == {s: c for s, c in wanted.items() if c}


def test_an_mlp_has_the_parameters_of_the_built_one() -> None:
    config = make_config(
        device="ipu-emulated", model={"kind": "mlp", "width": 24, "depth": 4}, mup={"base_width": 8},
        data={"images": "digits"}, batch={"micro": 4, "accumulation": 3}, ipu={"layers_per_ipu": [2, 2]},
    )
    model = build_meta(config, expected_vocab(config))
    assert network_of(config).parameters == sum(parameter.numel() for parameter in model.parameters())
    rows = ipu_memory(workload_of(config))
    assert [row.layers for row in rows] == [2, 2] and rows[0].items["streams"] == 4 * 64 * 4 * 3  # 3 micro-batches in flight
    assert rows[1].items["logits"] == 4 * 10 * 12


def test_what_a_layer_keeps_in_numbers() -> None:
    """34 d + 5 h s bytes a token (Korthikanti et al. 2022) for the usual layer in 16 bits; both streams at borders."""
    half = {"device": "ipu", "precision": "fp16-ipu"}
    config = ipu_config(model={"width": 64, "heads": 4, "seq": 32, "stack": {"kind": "residual"}}, **half)
    tokens = config.batch.micro * 32
    assert layer_bytes(workload_of(config)) == tokens * (34 * 64 + 5 * 4 * 32)
    assert boundary_bytes(workload_of(config)) == tokens * 64 * 2
    two = ipu_config(model={"width": 64, "heads": 4, "seq": 32}, **half)
    assert boundary_bytes(workload_of(two)) == 2 * tokens * 64 * 2


@pytest.mark.parametrize(
    "changes, each",
    [
        ({}, 4 + 4),
        ({"precision": "fp16-ipu", "device": "ipu"}, 2 + 4),
        ({"precision": "fp16-ipu", "device": "ipu", "ipu": {"first_moment": "float"}}, 4 + 4),
        ({"optimizer": {"kind": "sgd"}}, 0),
        ({"optimizer": {"kind": "sgd", "momentum": 0.9}}, 4),
    ],
)
def test_optimizer_state(changes: Dict[str, Any], each: int) -> None:
    rows = ipu_memory(workload_of(ipu_config(**changes)))
    assert [row.items["state"] for row in rows] == [row.parameters * each for row in rows]


def test_state_off_chip_or_shared() -> None:
    whole = ipu_memory(workload_of(ipu_config()))
    shared = ipu_memory(workload_of(ipu_config(batch={"replicas": 2}, ipu={"replicated_tensor_sharding": True})))
    away = ipu_memory(workload_of(ipu_config(ipu={"optimizer_state_offchip": True})))
    assert [row.items["state"] for row in shared] == [row.items["state"] // 2 for row in whole]
    assert [row.items["state"] for row in away] == [0, 0]
    assert [row.offchip for row in away] == [row.items["state"] for row in whole]


@pytest.mark.parametrize("every, tensors, layers", [(True, 3, 1), (False, 1, 2)])
def test_checkpoints_of_layers_or_of_stages(every: bool, tensors: int, layers: int) -> None:
    workload = workload_of(ipu_config(ipu={"recompute_checkpoint_every_layer": every}))
    first, second, _ = stage_memory(workload)
    assert second.items["stash"] == 3 * tensors * boundary_bytes(workload)
    assert first.items["stash"] == 5 * (tensors - 0.5) * boundary_bytes(workload)  # both streams begin as one
    assert first.items["live"] == layers * layer_bytes(workload)


def test_a_surrogate_keeps_gradients_and_no_activations() -> None:
    config = ipu_config(ipu={"layers_per_ipu": [4]}, memory={"ipu_backward": "surrogate"})
    workload = workload_of(config)
    (row,) = ipu_memory(workload)
    assert row.items["stash"] == boundary_bytes(workload)
    walk = 16 * (24 * 64 + 5 * 4 * 16)  # 16 tokens: the feed-forward's GELU, and five float32 streams beside the two kept
    assert row.items["live"] == walk + 4 * row.parameters


@pytest.mark.parametrize("precision", ["fp16-ipu", "fp32"])
@pytest.mark.parametrize("norm, activation, sandwich", [
    ("rmsnorm", "swiglu", False), ("rmsnorm", "relu", True), ("layernorm", "reglu", False), ("rmsnorm", "gelu", False),
])  # fmt: skip
def test_a_layer_needs_what_its_trace_does(norm: str, activation: str, sandwich: bool, precision: str) -> None:
    """RMS norms are written out, gates have two factors, a ReLU keeps its result only."""
    model = {"width": 64, "depth": 2, "heads": 4, "seq": 64, "norm": norm, "bias": norm == "layernorm", "activation": activation,
             "sandwich": sandwich, "stack": {"kind": "residual"}}  # fmt: skip
    config = ipu_config(model=model, precision=precision, device="ipu", ipu={"layers_per_ipu": [2]})
    plan = make_plan(workload_of(config))
    mine, traced = (found.ipus[0].items["live"] for found in (plan, traced_plan(plan, config)))
    assert 0.85 < mine / traced < 1.15


def test_logits_are_those_of_a_chunk() -> None:
    def logits(chunk: Any) -> int:
        return stage_memory(workload_of(ipu_config(memory={"loss_chunk": chunk})))[-1].items["logits"]

    assert logits(0) == logits(None) == 2 * 8 * VOCAB * 12
    assert logits(4) == 4 * VOCAB * 12


def test_other_devices_are_planned_as_ipus() -> None:
    config, notes = as_ipu(ipu_config(device="gpu", precision="bf16-mixed"))
    assert (config.device, config.precision) == ("ipu", "fp16-ipu") and len(notes) == 2
    assert as_ipu(ipu_config()) == (ipu_config(), [])


def test_a_pod_holds_as_many_replicas_as_there_is_room_for() -> None:
    assert workload_of(ipu_config(), 16).replicas == 8
    with pytest.raises(ConfigError, match="4, 16, 64, 128 or 256"):
        workload_of(ipu_config(), 8)
    wide = ipu_config(model={"depth": 8}, batch={"accumulation": 17}, ipu={"layers_per_ipu": [1] * 8})
    with pytest.raises(ConfigError, match="one replica takes 8 IPUs"):
        workload_of(wide, 4)
