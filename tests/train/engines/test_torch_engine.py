"""TorchEngine against loops written out by hand."""

from __future__ import annotations

from typing import Any, List, Tuple

import numpy as np
import pytest
import torch

from ipu_lean._compat import TORCH
from ipu_lean.config import Config, make_config
from ipu_lean.errors import ConfigError, RunError
from ipu_lean.optim import Schedule
from ipu_lean.train.engines import TorchEngine
from ipu_lean.train.world import World
from tests.train.toys import CONSTANT, ToyModel, ToyStep, make_adam, make_sgd

pytestmark = pytest.mark.pod


def config_of(**batch: Any) -> Config:
    train = batch.pop("train", {"clip": None})
    precision = batch.pop("precision", "fp32")
    return make_config(
        batch={"micro": 2, **batch}, train=train, precision=precision, optimizer={"lr": 0.1}, mup={"base_width": 64}
    )


def random_batch(rows: int, seed: int = 0, ignored: float = 0.2) -> Tuple[np.ndarray, np.ndarray]:
    draw = np.random.RandomState(seed)
    tokens = draw.randint(0, 11, (rows, 5)).astype(np.int32)
    labels = draw.randint(0, 11, (rows, 5)).astype(np.int32)
    labels[draw.rand(rows, 5) < ignored] = -100
    return tokens, labels


def by_hand(batches: List[Any], micro: int, clip: Any = None, lr: float = 0.1) -> Tuple[List[float], ToyModel]:
    """Mean over micro-batches of micro-batch means, plain SGD, torch's own clipping."""
    model = ToyModel()
    losses = []
    for tokens, labels in batches:
        means = []
        for start in range(0, len(tokens), micro):
            logits = model(torch.from_numpy(tokens[start : start + micro]).long()).flatten(0, 1)
            target = torch.from_numpy(labels[start : start + micro]).long().flatten()
            means.append(torch.nn.functional.cross_entropy(logits, target, ignore_index=-100))
        loss = torch.stack(means).mean()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
                parameter.grad = None
        losses.append(float(loss.detach()))
    return losses, model


def assert_close(one: torch.nn.Module, other: torch.nn.Module, tolerance: float = 1e-6) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters()):
        assert float((a - b).detach().norm() / b.detach().norm()) < tolerance, name


@pytest.mark.parametrize("accumulation, replicas", [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_steps_equal_the_loop_by_hand(accumulation: int, replicas: int, clip: Any) -> None:
    config = config_of(accumulation=accumulation, replicas=replicas, train={"clip": clip})
    batches = [random_batch(2 * accumulation * replicas, seed) for seed in range(4)]
    engine = TorchEngine(ToyStep(ToyModel()), make_sgd(), CONSTANT, config)
    results = [engine.train_step(batch) for batch in batches]
    losses, model = by_hand(batches, 2, clip)
    assert np.allclose([result.loss for result in results], losses, rtol=1e-6)
    assert_close(engine.model, model)
    assert all(result.tokens == 5 * 2 * accumulation * replicas for result in results)
    if clip is not None:
        assert all(result.grad_norm > clip for result in results), "clipping was to have an effect"


def test_sums_count_every_label_once() -> None:
    batch = random_batch(6)
    engine = TorchEngine(ToyStep(ToyModel()), make_sgd(), CONSTANT, config_of(accumulation=3))
    model = ToyModel()
    with torch.no_grad():
        logits = model(torch.from_numpy(batch[0]).long()).flatten(0, 1)
    target = torch.from_numpy(batch[1]).long().flatten()
    kept = target != -100
    expected = [
        float(torch.nn.functional.cross_entropy(logits[kept].double(), target[kept], reduction="sum")),
        float((logits.argmax(-1) == target)[kept].sum()),
        float(kept.sum()),
    ]
    assert np.allclose(engine.eval_step(batch), expected, rtol=1e-6)
    assert np.allclose(engine.train_step(batch).sums, expected, rtol=1e-6)


def test_learning_rate_follows_schedule_and_device_iterations() -> None:
    schedule = Schedule("linear", 2, 8, 0.0)
    engine = TorchEngine(
        ToyStep(ToyModel()),
        make_sgd(),
        schedule,
        config_of(device_iterations=2, train={"steps": 8, "eval_every": 0, "save_every": 2}),
    )
    rates = [engine.train_step(random_batch(2, seed)).lr for seed in range(6)]
    assert np.allclose(rates, [0.1 * schedule.multiplier(2 * (update // 2)) for update in range(6)])
    assert rates[0] == rates[1] != rates[2] == rates[3]


def test_evaluation_changes_nothing() -> None:
    engine = TorchEngine(ToyStep(ToyModel(dropout=0.5)), make_sgd(), CONSTANT, config_of())
    engine.train_step(random_batch(2))
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in engine.model.state_dict().items()}
    first = engine.eval_step(random_batch(2))
    assert np.array_equal(first, engine.eval_step(random_batch(2))), "no dropout in evaluation"
    assert torch.equal(before, torch.get_rng_state()) and engine.model.training
    assert all(torch.equal(value, state[name]) for name, value in engine.model.state_dict().items())


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_non_finite_numbers_stop_before_the_weights_move(what: str) -> None:
    step = ToyStep(ToyModel())
    engine = TorchEngine(step, make_sgd(), CONSTANT, config_of())
    engine.train_step(random_batch(2))
    state = {name: value.clone() for name, value in engine.model.state_dict().items()}
    if what == "loss":
        original = step.forward
        engine.wrapped.forward = lambda x, y: tuple(part * float("nan") for part in original(x, y))
    else:
        engine.model.hidden.weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(RunError, match=f"{'loss is nan' if what == 'loss' else 'norm is'}.* at step 2"):
        engine.train_step(random_batch(2))
    assert all(torch.equal(value, state[name]) for name, value in engine.model.state_dict().items())


def test_state_goes_on_bit_for_bit() -> None:
    config = config_of(accumulation=2)
    straight = TorchEngine(ToyStep(ToyModel()), make_adam(), CONSTANT, config)
    for seed in range(6):
        straight.train_step(random_batch(4, seed))
    first = TorchEngine(ToyStep(ToyModel()), make_adam(), CONSTANT, config)
    for seed in range(3):
        first.train_step(random_batch(4, seed))
    second = TorchEngine(ToyStep(ToyModel()), make_adam(), CONSTANT, config)
    second.model.load_state_dict(first.sync_to_host())
    second.load_optimizer_state(first.optimizer_state())
    second.load_state_dict(first.state_dict())
    for seed in range(3, 6):
        second.train_step(random_batch(4, seed))
    assert second.update == 6
    for name, value in straight.sync_to_host().items():
        assert torch.equal(value, second.sync_to_host()[name]), name


def test_optimizer_state_is_a_copy_and_named() -> None:
    engine = TorchEngine(ToyStep(ToyModel()), make_adam(), CONSTANT, config_of())
    engine.train_step(random_batch(2))
    saved = engine.optimizer_state()
    assert set(saved["state"]) == {name for name, _ in engine.model.named_parameters()}
    other = TorchEngine(ToyStep(ToyModel()), make_adam(), CONSTANT, config_of())
    other.load_optimizer_state(saved)
    before = saved["state"]["hidden.weight"]["exp_avg"].clone()
    other.train_step(random_batch(2, 9))
    assert torch.equal(saved["state"]["hidden.weight"]["exp_avg"], before)


def test_other_groups_are_refused() -> None:
    engine = TorchEngine(ToyStep(ToyModel()), make_adam(), CONSTANT, config_of())
    engine.train_step(random_batch(2))
    saved = engine.optimizer_state()
    saved["groups"][0]["params"].reverse()
    with pytest.raises(RunError, match="another membership"):
        engine.load_optimizer_state(saved)


@pytest.mark.skipif(TORCH < (2, 3), reason="CPU autocast has no fp16 before torch 2.3")
def test_fp16_overflow_skips_the_update_and_halves_the_scale() -> None:
    scale = {"init": 1024.0, "window": 2, "minimum": 256.0}
    engine = TorchEngine(
        ToyStep(ToyModel()), make_sgd(), CONSTANT, config_of(precision="fp16-mixed", train={"clip": None, "fp16_scale": scale})
    )
    first = engine.train_step(random_batch(2))
    _, model = by_hand([random_batch(2)], 2)
    assert_close(engine.model, model, 2e-3)
    assert not first.skipped and engine.scale.scale == 1024.0
    before = engine.model.hidden.weight.detach().clone()
    handle = engine.model.hidden.weight.register_hook(lambda grad: grad * float("inf"))
    result = engine.train_step(random_batch(2))
    assert result.skipped and result.grad_norm is None and torch.equal(before, engine.model.hidden.weight)
    assert engine.scale.scale == 512.0 and engine.update == 2
    engine.train_step(random_batch(2))
    with pytest.raises(RunError, match="overflow fp16 at step 4"):
        engine.train_step(random_batch(2))
    handle.remove()


@pytest.mark.parametrize("precision, tolerance", [("bf16-mixed", 2e-2), ("fp16-mixed", 3e-3)])
def test_autocast_gradients_stay_close(precision: str, tolerance: float) -> None:
    if precision == "fp16-mixed" and TORCH < (2, 3):
        pytest.skip("CPU autocast has no fp16 before torch 2.3")
    engine = TorchEngine(ToyStep(ToyModel()), make_sgd(), CONSTANT, config_of(precision=precision, accumulation=2))
    engine.train_step(random_batch(4))
    _, model = by_hand([random_batch(4)], 2)
    start = ToyModel()
    moved = False
    for (name, a), b, c in zip(engine.model.named_parameters(), model.parameters(), start.parameters()):
        assert a.dtype == torch.float32 and float((b - c).detach().norm()) > 0
        difference = float((a - b).detach().norm() / (b - c).detach().norm())
        assert difference < tolerance, name
        moved = moved or difference > 1e-6
    assert moved, "the pass was to run in 16 bits"


def test_world_must_divide_replicas() -> None:
    with pytest.raises(ConfigError, match="3 processes share them evenly"):
        TorchEngine(ToyStep(ToyModel()), make_sgd(), CONSTANT, config_of(replicas=4), World(0, 3))


def test_an_engine_without_optimizer_evaluates() -> None:
    engine = TorchEngine(ToyStep(ToyModel()), None, None, config_of())
    assert engine.eval_step(random_batch(2)).shape == (3,)
