"""The PopTorch engine on the emulator beside TorchEngine: same losses, weights, moments; either goes on where one stopped."""

from __future__ import annotations

import sys
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import torch

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.train.engines import make_engine
from ipu_lean.train.world import World
from tests.ipu.helpers import ipu_config, lively
from tests.train.engines.pairs import SILENT, UPDATES, calls, engines, worst

pytestmark = pytest.mark.pod

CASES: Dict[str, Dict[str, Any]] = {
    "tied, adamw": {},
    "untied, adamw": {"model": {"tied": False}},
    "untied, head on the first IPU": {"model": {"tied": False}, "ipu": {"head_ipu": 0}},
    "residual": {"model": {"stack": {"kind": "residual"}}},
    "adam": {"optimizer": {"kind": "adam", "weight_decay": 0.0}},
    "adam with decay, not clipped": {"optimizer": {"kind": "adam", "weight_decay": 0.1}, "train": {"clip": None}},
    "sgd": {"optimizer": {"kind": "sgd", "lr": 0.05, "weight_decay": 0.01}},
    "sgd, nesterov": {"optimizer": {"kind": "sgd", "lr": 0.02, "momentum": 0.9, "nesterov": True}},
    "clipped hard": {"train": {"clip": 0.01}},
    "constant rate": {"schedule": {"kind": "constant", "warmup": 0}},
    "linear schedule": {"schedule": {"kind": "linear", "final": 0.0}},
    "replicas": {"batch": {"replicas": 2}},
    "four IPUs": {"ipu": {"layers_per_ipu": [1, -1, -1, -1]}, "batch": {"accumulation": 9}},
    "sharded": {"ipu": {"execution": "sharded"}, "batch": {"accumulation": 1}},
    "one IPU": {
        "ipu": {"layers_per_ipu": None},
        "batch": {"accumulation": 1, "device_iterations": 3},
        "train": {"steps": 6, "eval_every": 0, "save_every": 6},
    },
    "loss scaling": {"ipu": {"loss_scaling": 64.0}},
    "standard parametrisation": {"mup": {"parametrization": "standard", "base_width": None}},
    "chunked loss": {"memory": {"loss_chunk": 5}},
    "momentum": {"model": {"stack": {"coupling": "momentum"}}},
    "mean, gate": {"model": {"stack": {"coupling": "mean", "output": "gate"}}},
    "exact": {"model": {"stack": {"exact": True}}},
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_numbers_as_on_the_cpu(name: str) -> None:
    config = ipu_config(**CASES[name])
    device, host = engines(config)
    mine, theirs = calls(config)
    start = {key: value.clone() for key, value in host.sync_to_host().items()}
    wanted = [host.train_step(batch) for batch in theirs]
    found = [device.train_step(batch) for batch in mine]
    losses = [loss for result in found for loss in result.losses]
    np.testing.assert_allclose(losses, [result.loss for result in wanted], rtol=1e-6)
    iterations = config.batch.device_iterations
    for index, result in enumerate(found):
        last = wanted[(index + 1) * iterations - 1]
        assert result.lr == last.lr and result.loss == result.losses[-1]
        group = wanted[index * iterations : (index + 1) * iterations]
        assert result.tokens == sum(one.tokens for one in group)
        np.testing.assert_allclose(result.sums, np.sum([one.sums for one in group], 0), rtol=1e-6)
    weights = device.sync_to_host()
    assert worst(weights, host.sync_to_host())[0] < 1e-5
    moved = [key for key, value in start.items() if value.is_floating_point() and torch.equal(value, weights[key])]
    assert moved == [], "every tensor must have been trained"
    device.close()


def test_the_path_of_a_real_poptorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`device: ipu` with the emulator under PopTorch's name: nothing asks which of the two it is."""
    monkeypatch.setitem(sys.modules, "poptorch", poptorch)
    emulated = ipu_config()
    config = emulated.model_copy(update={"device": "ipu"})
    batch = calls(config)[0][0]
    found = []
    for one in (config, emulated):
        engine = make_engine(lively(one), one, World())
        found.append(engine.train_step(batch))
        engine.close()
    assert found[0] == found[1]


def test_the_rate_is_constant_within_a_call() -> None:
    config = ipu_config(schedule={"kind": "linear", "warmup": 0, "final": 0.0})
    device, host = engines(config)
    mine, theirs = calls(config)
    assert [device.train_step(batch).lr for batch in mine] == [host.train_step(batch).lr for batch in theirs][::2]
    device.close()


def test_moments_are_those_of_torch() -> None:
    for optimizer in ({"kind": "adamw"}, {"kind": "sgd", "lr": 0.02, "momentum": 0.9}):
        config = ipu_config(optimizer=optimizer)
        device, host = engines(config)
        mine, theirs = calls(config)
        for batch in mine:
            device.train_step(batch)
        for batch in theirs:
            host.train_step(batch)
        found, wanted = device.optimizer_state(), host.optimizer_state()
        assert [group["params"] for group in found["groups"]] == [group["params"] for group in wanted["groups"]]
        assert set(found["state"]) == set(wanted["state"])
        for name, entry in wanted["state"].items():
            assert set(found["state"][name]) == {key for key, value in entry.items() if value is not None}, name
            for key, value in entry.items():
                mine_value = found["state"][name][key]
                if key == "step":
                    assert float(mine_value) == float(value) == UPDATES
                elif SILENT not in name:
                    assert float((mine_value - value).norm() / value.norm()) < 1e-4, (name, key)
        device.close()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("first", ["device", "host"])
def test_a_run_changes_devices(first: str, optimizer: str) -> None:
    """Half of the updates on one device, half on the other: as if there had been one."""
    own = {"kind": "adamw"} if optimizer == "adamw" else {"kind": "sgd", "lr": 0.02, "momentum": 0.9}
    config = ipu_config(optimizer=own)
    mine, theirs = calls(config, updates=8)
    whole = engines(config)[1]
    for batch in theirs:
        whole.train_step(batch)
    device, host = engines(config)
    order: List[Tuple[Any, List[Any]]] = [(device, mine[:2]), (host, theirs[4:])]
    if first == "host":
        order = [(host, theirs[:4]), (device, mine[2:])]
    (one, batches), (two, rest) = order
    for batch in batches:
        one.train_step(batch)
    weights, state, numbers = one.sync_to_host(), one.optimizer_state(), one.state_dict()
    two.model.load_state_dict({name: value.clone() for name, value in weights.items()})
    two.load_optimizer_state(state)
    two.load_state_dict(numbers)
    for batch in rest:
        two.train_step(batch)
    assert worst(two.sync_to_host(), whole.sync_to_host())[0] < 1e-5
    device.close()


def test_state_that_was_loaded_and_not_used_is_handed_on() -> None:
    config = ipu_config()
    device, _ = engines(config)
    device.train_step(calls(config)[0][0])
    state, numbers = device.optimizer_state(), device.state_dict()
    fresh, _ = engines(config)
    fresh.load_optimizer_state(state)
    fresh.load_state_dict(numbers)
    again = fresh.optimizer_state()
    name = next(iter(state["state"]))
    assert torch.equal(again["state"][name]["exp_avg"], state["state"][name]["exp_avg"])
    assert fresh.state_dict() == numbers and numbers["ipu"]["rng"] is not None
    device.close()
