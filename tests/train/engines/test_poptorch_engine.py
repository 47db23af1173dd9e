"""The PopTorch engine on the emulator beside TorchEngine: same losses, weights, moments; one executor on the device at a time."""

from __future__ import annotations

import sys
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import torch

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.config import Config
from ipu_lean.errors import CheckpointError, ConfigError, RunError
from ipu_lean.ipu.emulator import machine
from ipu_lean.train.engines import DeviceFailure, PopTorchEngine, TorchEngine, make_engine
from ipu_lean.train.evaluate import summarise
from ipu_lean.train.world import World
from tests.ipu.helpers import VOCAB, batch_for, ipu_config, lively

pytestmark = pytest.mark.pod

UPDATES = 6
SILENT = "key.linear.bias"  # its true gradient is zero, so Adam would compare noise


def on_cpu(config: Config) -> Config:
    return config.model_copy(update={"device": "cpu"})


def engines(config: Config, seed: int = 1) -> Tuple[PopTorchEngine, TorchEngine]:
    """Both engines from the same weights."""
    device = make_engine(lively(config, seed), config, World())
    host = make_engine(lively(config, seed), on_cpu(config), World())
    assert isinstance(device, PopTorchEngine) and isinstance(host, TorchEngine)
    return device, host


def calls(config: Config, updates: int = UPDATES, seed: int = 0) -> Tuple[List[Any], List[Any]]:
    """The same rows as the device's calls and as single updates."""
    tokens, labels = batch_for(config, updates, seed)
    each = config.batch.global_batch
    many = each * config.batch.device_iterations

    def cut(size: int) -> List[Any]:
        return [(tokens[i : i + size], labels[i : i + size]) for i in range(0, len(tokens), size)]

    return cut(many), cut(each)


def worst(one: Dict[str, torch.Tensor], other: Dict[str, torch.Tensor]) -> Tuple[float, str]:
    """The largest relative difference of a tensor, in norm, and its name."""
    assert list(one) == list(other)
    found = [
        (float((one[name] - other[name]).norm() / other[name].norm()), name)
        for name in one
        if one[name].is_floating_point() and SILENT not in name
    ]
    return max(found)


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


def test_evaluation_gives_the_hosts_sums_and_leaves_training_as_it_was() -> None:
    config = ipu_config(model={"dropout": 0.2})
    device, host = engines(config)
    twin, _ = engines(config)
    mine, _ = calls(config, updates=4)
    device.train_step(mine[0])
    rows = config.batch.micro * device.eval_micro_batches
    tokens, labels = (array[:rows] for array in batch_for(config, 1, seed=9))
    assert device.eval_micro_batches == 3 and rows == 6
    host.model.load_state_dict({name: value.clone() for name, value in device.sync_to_host().items()})
    np.testing.assert_allclose(device.eval_step((tokens, labels)), host.eval_step((tokens, labels)), rtol=1e-6)
    device.train_step(mine[1])
    weights = device.sync_to_host()
    device.close()
    for batch in mine[:2]:
        twin.train_step(batch)
    # Bit for bit, dropout included: the evaluation took nothing from the training's random numbers.
    for (name, one), other in zip(weights.items(), twin.sync_to_host().values()):
        assert torch.equal(one, other), name
    twin.close()


def test_evaluation_sees_new_weights_each_time() -> None:
    config = ipu_config()
    device, _ = engines(config)
    mine, _ = calls(config)
    rows = config.batch.micro * device.eval_micro_batches
    held = tuple(array[:rows] for array in batch_for(config, 1, seed=9))
    losses = []
    for batch in mine:
        device.train_step(batch)
        losses.append(summarise(*device.eval_step(held))["loss"])
    assert len(set(losses)) == len(mine)
    device.close()


def test_one_executor_holds_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ipu_config()
    device, _ = engines(config)
    mine, _ = calls(config)
    held = tuple(array[: config.batch.micro * device.eval_micro_batches] for array in batch_for(config, 1))
    attached: List[int] = []
    real = machine.acquire
    monkeypatch.setattr(machine, "acquire", lambda owner, count: (real(owner, count), attached.append(len(machine._owners()))))
    for batch in mine:
        device.train_step(batch)
        device.eval_step(held)
        device.eval_step(held)
    assert len(attached) == 2 * len(mine) and set(attached) == {1}
    device.detach()
    assert not machine._owners()
    device.attach()
    assert device.executor.isAttachedToDevice() and len(machine._owners()) == 1
    device.close()
    assert not machine._owners()


def test_an_engine_that_only_evaluates() -> None:
    config = ipu_config()
    model = lively(config)
    engine = make_engine(model, config, World(), train=False)
    host = make_engine(lively(config), on_cpu(config), World(), train=False)
    held = tuple(array[: config.batch.micro * engine.eval_micro_batches] for array in batch_for(config, 1))
    np.testing.assert_allclose(engine.eval_step(held), host.eval_step(held), rtol=1e-6)
    engine.close()


def test_close_gives_the_model_back() -> None:
    config = ipu_config()
    device, _ = engines(config)
    model = device.model
    device.train_step(calls(config)[0][0])
    trained = device.sync_to_host()["embedding.token.weight"].clone()
    device.close()
    assert type(device.step).__name__ == "PopTrainStep"
    assert type(model.embedding.token.weight) is torch.nn.Parameter
    assert torch.equal(model.embedding.token.weight, trained)
    assert not any(module._forward_pre_hooks for module in model.modules())
    device.close()  # twice does no harm


def test_fp16_stays_near_fp32() -> None:
    config = ipu_config(
        precision="fp16-ipu", ipu={"emulate_precision": True}, train={"steps": 10, "eval_every": 0, "save_every": 10}
    )
    device = make_engine(lively(config), config, World())
    full = config.model_copy(update={"precision": "fp32"})
    host = make_engine(lively(full), on_cpu(full), World())
    mine, theirs = calls(config, updates=10)
    losses = [loss for batch in mine for loss in device.train_step(batch).losses]
    wanted = [host.train_step(batch).loss for batch in theirs]
    np.testing.assert_allclose(losses, wanted, rtol=1e-2)
    assert losses != wanted
    weights = device.sync_to_host()
    assert {value.dtype for value in weights.values() if value.is_floating_point()} == {torch.float32}
    device.close()


# What goes wrong.
def test_a_loss_that_is_not_finite_names_its_step() -> None:
    config = ipu_config()
    device, _ = engines(config)
    mine, _ = calls(config)
    device.train_step(mine[0])
    with torch.no_grad():
        device.model.norm.weight.fill_(float("nan"))
    device.executor.copyWeightsToDevice()
    with pytest.raises(RunError, match="nan at step 3"):
        device.train_step(mine[1])
    device.close()


def test_weights_that_are_not_finite_are_not_handed_out() -> None:
    config = ipu_config()
    device, _ = engines(config)
    with torch.no_grad():
        device.model.norm.weight[0] = float("inf")
    with pytest.raises(RunError, match="norm.weight is not finite after step 0"):
        device.sync_to_host()


def test_a_recoverable_failure_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ipu_config()
    device, _ = engines(config)
    mine, _ = calls(config)
    device.train_step(mine[0])
    recoverable = poptorch.RecoverableError("link down")
    recoverable.recovery_action = "LINK_RESET"
    monkeypatch.setattr(device, "executor", _Failing(device.executor, recoverable))
    with pytest.raises(DeviceFailure, match="LINK_RESET: link down"):
        device.train_step(mine[1])
    device.executor.error = poptorch.Error("out of memory on tile 0: 812345 bytes used, 638976 available")
    with pytest.raises(RunError, match=r"tile 0: 812345 of 638976 bytes.*lower batch.micro") as caught:
        device.train_step(mine[1])
    assert not isinstance(caught.value, DeviceFailure)
    device.close()


class _Failing:
    """An executor whose call fails."""

    def __init__(self, executor: Any, error: Exception) -> None:
        self.executor, self.error = executor, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)

    def __call__(self, *args: Any) -> Any:
        raise self.error


def test_a_step_that_poptorch_refuses_is_a_run_error() -> None:
    config = ipu_config()
    device, _ = engines(config)
    device.model.layers.blocks[0].branches[0].attention.set_implementation("fused")
    with pytest.raises(RunError, match="PopTorch refused.*scaled_dot_product"):
        device.train_step(calls(config)[0][0])


def test_a_call_cannot_begin_inside_another() -> None:
    config = ipu_config()
    device, _ = engines(config)
    device.load_state_dict({"update": 3, "scale": None})
    with pytest.raises(CheckpointError, match="multiple of 2"):
        device.train_step(calls(config)[0][0])


def test_a_program_for_other_machines_is_compiled_and_not_run() -> None:
    config = ipu_config(ipu={"offline_target": "ipu21"})
    device, _ = engines(config)
    batch = calls(config)[0][0]
    device.compile(batch)
    assert device.executor.isCompiled() and not device.executor.isAttachedToDevice()
    with pytest.raises(ConfigError, match="offline target cannot run"):
        device.train_step(batch)


def test_more_ipus_than_one_process_drives() -> None:
    config = ipu_config(batch={"replicas": 64})
    with pytest.raises(ConfigError, match="64 replicas of 2 are 128 IPUs"):
        make_engine(lively(config), config, World())


def test_moments_of_other_groups_are_refused() -> None:
    config = ipu_config()
    device, _ = engines(config)
    with pytest.raises(CheckpointError, match="another membership"):
        device.load_optimizer_state({"state": {}, "groups": [{"params": ["x"]}]})


def test_a_compilation_is_announced() -> None:
    said: List[str] = []
    config = ipu_config()
    device = make_engine(lively(config), config, World(), said.append)
    device.train_step(calls(config)[0][0])
    assert said[0] == "compiling the training step for 2 IPUs"
    texts = device.describe()
    assert "train.gradient_accumulation = 5" in texts["ipu_options.txt"] and "head" in texts["ipu_placement.txt"]
    device.close()


def test_vocabulary_of_the_helpers() -> None:
    assert lively(ipu_config()).spec.vocab == VOCAB
