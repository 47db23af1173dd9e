"""Hashed and local attention on IPUs: what is traced, the surrogate backward pass, rotations that the host redraws."""

from __future__ import annotations

import copy
from typing import Any, Dict, List

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.config import Config
from ipu_lean.ipu import PopTrainStep, SurrogateStep
from ipu_lean.ipu.check import check, format_check
from ipu_lean.ipu.rotations import sources
from ipu_lean.nn import LSHSelfAttention
from ipu_lean.optim import build_schedule
from ipu_lean.train.engines.poptorch_engine import PopTorchEngine
from tests.ipu.helpers import VOCAB, batch_for, ipu_config, lively
from tests.ipu.test_surrogate import check_gradients, compare, micro_batch, surrogate_config, train

pytestmark = pytest.mark.pod

MIXED: Dict[str, Any] = {
    "attention": ["local", "lsh"], "seq": 32, "heads": 2, "tied": False, "positions": "axial",
    "local": {"chunk": 4}, "lsh": {"chunk": 4, "hashes": 2}, "stack": {"output": "concat"},
}
MODELS: Dict[str, Dict[str, Any]] = {
    "mixed, two rounds, concatenated": {},
    "padded, not a multiple of the chunk": {"seq": 30},
    "chunks after, two factors, rotary, gated": {
        "lsh": {"chunk": 4, "before": 2, "after": 1, "buckets": [4, 6]}, "local": {"chunk": 8, "after": 1}, "positions": "rotary",
        "activation": "swiglu"
    },
    "hashed only, many buckets, dropout": {
        "attention": "lsh", "local": {}, "lsh": {"chunk": 4, "buckets": 40}, "dropout": 0.2, "attention_dropout": 0.1
    },
    "shared layers, with full attention": {
        "attention": ["lsh", "full"], "local": {}, "num_hidden_groups": 2, "tied": True, "stack": {"output": "sum"}
    },
}  # fmt: skip
NOT_HASHED = {"lsh": {"chunk": 4, "full_below": 32}}


def mixed(**changes: Any) -> Config:
    """Two pipelined IPUs, local and hashed layers in turn."""
    return ipu_config(**{**changes, "model": {**MIXED, **changes.get("model", {})}})


def mixed_surrogate(**changes: Any) -> Config:
    """The same on one IPU, walked backwards by itself."""
    return surrogate_config(**{**changes, "model": {**MIXED, **changes.get("model", {})}})


# What is traced.


def test_check_passes_and_counts_in_place_of_sorting() -> None:
    made = {name: mixed(model=model) for name, model in MODELS.items()}
    made["not hashed"] = mixed(model=NOT_HASHED)
    for name, config in made.items():
        result = check(config)
        assert result.verdict == "pass" and result.found.notes == [], f"{name}: {format_check(result)}"
        ops = {row["op"] for row in result.found.ops}
        assert all(row["handler"] != "none" for row in result.found.ops), name
        assert not ops & {"aten::sort", "aten::argsort", "aten::topk", "aten::index_put", "aten::remainder"}, name
        assert ("aten::cumsum" in ops) == (name != "not hashed"), name


def test_check_passes_in_half_precision() -> None:
    section = {"precision": "fp16-ipu", "ipu": {"emulate_precision": True}}
    for make in (mixed, mixed_surrogate):  # the surrogate step has operations of its own
        found = check(make(**section))
        assert found.verdict == "pass" and found.found.notes == [], format_check(found)
        assert not {row["op"] for row in found.found.ops} & {"aten::sort", "aten::index_put"}
        scores = [row for row in found.found.ops if row["op"] == "aten::logsumexp"]
        assert scores and all(row["dtypes"] == ["float32"] for row in scores)


def test_check_names_what_an_ipu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting by division, as it would be written for a CPU: the module and the line are named."""
    from ipu_lean.nn.attention import lsh

    def divided(buckets: torch.Tensor, count: int, method: str) -> Any:
        order = torch.div(buckets, 2, rounding_mode="floor")
        return order, order

    monkeypatch.setattr(lsh, "bucket_order", divided)
    result = check(mixed())
    text = str(result.findings[0])
    assert result.verdict == "fail" and "rounding_mode" in text and "test_reformer.py:" in text
    assert "module `model.layers.blocks.1.branches.0.attention`" in text


# The surrogate backward pass.


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_plain_autograd(name: str) -> None:
    check_gradients(mixed_surrogate(model=MODELS[name]))


def test_tokens_are_hashed_once_although_layers_run_twice() -> None:
    """The walk back is told the order of the walk forward: rebuilt inputs differ by rounding, and would hash otherwise."""
    config = mixed_surrogate()
    model = lively(config)
    assert sum(isinstance(module, LSHSelfAttention) for module in model.modules()) == 2
    step = SurrogateStep(model, poptorch, config)
    orders: List[torch.Tensor] = []
    walk = step._walk[0]
    true = walk.evaluate

    def spied(*args: Any, **kwargs: Any) -> Any:
        made = true(*args, **kwargs)
        orders.extend(made.decisions)
        return made

    walk.evaluate = spied
    step(*micro_batch(config))
    forward, back = orders[:2], orders[:1:-1]
    assert len(orders) == 4 and all(one is other for one, other in zip(forward, back))


def test_fifty_updates_are_those_of_plain_training() -> None:
    """AdamW, accumulation 3, two device iterations, loss scaling, clipping."""
    changes = {"model": MIXED, "train": {"clip": 1.0}, "ipu": {"loss_scaling": 8.0},
               "optimizer": {"lr": 1e-3, "weight_decay": 0.1}}  # fmt: skip
    loss, weights = compare(train("recompute", 50, **changes), train("surrogate", 50, **changes))
    assert loss < 1e-6
    assert weights < 1e-5


# Rotations.


def engine_of(config: Config, model: nn.Module) -> PopTorchEngine:
    return PopTorchEngine(model, config, build_schedule(config))


def on_device(engine: PopTorchEngine, executor: Any = None) -> Dict[str, torch.Tensor]:
    buffers = (executor or engine.executor)._executable.buffers[0]
    return {name: buffers[name] for name in engine._redraw.names}


def expected(engine: PopTorchEngine, draw: int) -> List[torch.Tensor]:
    return [module.drawn(draw).float() for module in sources(engine.step.model)]


def check_draw(engine: PopTorchEngine, draw: int, executor: Any = None) -> None:
    buffers, wanted = on_device(engine, executor), expected(engine, draw)
    assert len(buffers) == len(wanted) > 0
    for buffer, tensor in zip(buffers.values(), wanted):
        torch.testing.assert_close(buffer, tensor, rtol=0, atol=0)


def test_the_host_redraws_and_moves_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates a call, a draw every two: each call has its own, and neither weights nor moments are fetched for it."""
    config = mixed(model={"lsh": {"chunk": 4, "redraw_every": 2}})
    engine = engine_of(config, lively(config))
    engine.train_step(batch_for(config, 2, 0))
    check_draw(engine, 0)
    fetched: List[str] = []
    for name in ("copyWeightsToHost", "copyWeightsToDevice"):
        monkeypatch.setattr(engine.executor, name, lambda name=name: fetched.append(name))
    monkeypatch.setattr(engine.executor._executable, "read_state", lambda: fetched.append("read_state"))
    for call in (1, 2):
        engine.train_step(batch_for(config, 2, call))
        check_draw(engine, 2 * call)
    assert fetched == [] and engine.optimizer.host_state_is_dirty
    monkeypatch.undo()
    engine.sync_to_host()
    engine.train_step(batch_for(config, 2, 3))  # the host was not edited behind the device's back
    engine.close()
    for module, tensor in zip(sources(engine.step.model), expected(engine, 6)):
        torch.testing.assert_close(module.rotations, tensor, rtol=0, atol=0)


def test_more_than_ten_layers_get_their_own_rotations() -> None:
    """PopTorch sorts buffers by name, and layer 10 stands before layer 2 in the alphabet."""
    model = {"attention": "lsh", "local": {}, "depth": 12, "width": 8, "heads": 1, "stack": {"output": "sum"}}
    config = mixed(model=model, ipu={"layers_per_ipu": [12]}, batch={"accumulation": 1, "device_iterations": 1})
    engine = engine_of(config, lively(config))
    for call in range(2):
        engine.train_step(batch_for(config, 1, call))
        check_draw(engine, call)
    engine.close()


def test_evaluation_and_resumed_runs_hash_as_training_did() -> None:
    config = mixed()
    engine = engine_of(config, lively(config))
    rows = slice(0, config.batch.micro * engine.eval_micro_batches)
    evaluated = tuple(array[rows] for array in batch_for(config, 2, 9))
    for call in range(2):
        engine.train_step(batch_for(config, 2, call))
    sums = engine.eval_step(evaluated)
    check_draw(engine, 2, engine.evaluator)
    weights = {name: tensor.clone() for name, tensor in engine.sync_to_host().items()}
    moments, state = copy.deepcopy(engine.optimizer_state()), engine.state_dict()
    after = engine.train_step(batch_for(config, 2, 2))
    check_draw(engine, 4)
    engine.close()
    model = lively(config)
    model.load_state_dict(weights)
    again = engine_of(config, model)
    again.load_optimizer_state(moments)
    again.load_state_dict(state)
    assert (again.eval_step(evaluated) == sums).all()
    check_draw(again, 2, again.evaluator)
    assert again.train_step(batch_for(config, 2, 2)).losses == after.losses
    check_draw(again, 4)
    again.close()


@pytest.mark.parametrize("lsh", [{"chunk": 4, "redraw_every": 0}, NOT_HASHED["lsh"]], ids=["drawn once", "never hashed"])
def test_what_never_changes_is_not_sent(lsh: Dict[str, Any]) -> None:
    config = mixed(model={"lsh": lsh})
    engine = engine_of(config, lively(config))
    engine.train_step(batch_for(config, 2, 0))
    assert engine._redraw.names == [] and "updatableNamedBuffers" not in engine.options.train._popart.options
    engine.close()


def test_a_step_leaves_the_model_its_own_rotations() -> None:
    """A trace must not leave other buffers behind (python/_impl.py:432), nor may a plain call."""
    config = mixed()
    model = lively(config)
    own = [module.rotations for module in sources(model)]
    step = PopTrainStep(model, poptorch)
    batch = micro_batch(config)
    before = step(*batch)[0]
    names = step.hold_rotations()
    assert torch.equal(step(*batch)[0], before)
    for name in names:
        getattr(step, name).mul_(-1.0).add_(0.5)
    assert not torch.equal(step(*batch)[0], before)
    assert all(module.rotations is buffer for module, buffer in zip(sources(model), own))
    assert not set(names) & set(step.state_dict()) and model.spec.vocab == VOCAB
