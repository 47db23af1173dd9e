"""The PopTorch engine and its device: evaluation beside training, one executor at a time, and what goes wrong."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import pytest
import torch

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.errors import CheckpointError, ConfigError, RunError
from ipu_lean.ipu.emulator import machine
from ipu_lean.train.engines import DeviceFailure, make_engine
from ipu_lean.train.evaluate import summarise
from ipu_lean.train.world import World
from tests.ipu.helpers import batch_for, ipu_config, lively
from tests.train.engines.pairs import calls, engines, on_cpu

pytestmark = pytest.mark.pod


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
