"""`memory.fused_update`: updates inside the backward pass give the bits of updates after it, and free each gradient at once."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import torch

from ipu_lean.config import make_config
from ipu_lean.errors import ConfigError, EnvironmentProblem, RunError
from ipu_lean.models import TrainStep, build_model
from ipu_lean.optim import Schedule
from ipu_lean.optim import fused as fused_module
from ipu_lean.sweep.study.peak import peak_megabytes
from ipu_lean.train.engines import TorchEngine, make_engine
from ipu_lean.train.precision import check_precision
from ipu_lean.train.world import World
from tests.train.helpers import in_two_halves, timeless, write_yaml

HOOKS = hasattr(torch.Tensor, "register_post_accumulate_grad_hook")
needs_hooks = pytest.mark.skipif(not HOOKS, reason="this torch does not say when a gradient is complete")
VOCAB = 300


def make(fused: bool, **sections: Any) -> Any:
    memory = {**sections.pop("memory", {}), "fused_update": fused}
    model = {"width": 64, "depth": 2, "heads": 2, "seq": 16, **sections.pop("model", {})}
    if model.get("kind") == "mlp":
        model = {"kind": "mlp", "width": 64, "depth": 2}
        sections["data"] = {"images": "digits", "validation": {}}
    mup = {"base_width": 32, "readout_zero_init": False, **({} if model.get("kind") == "mlp" else {"query_zero_init": False})}
    config = make_config(
        **{"model": model, "memory": memory, "mup": mup, "batch": {"micro": 2}, "schedule": {"warmup": 2}, **sections,
           "train": {"clip": None, "steps": 50}}
    )  # fmt: skip
    return make_engine(build_model(config, 10 if config.model.kind == "mlp" else VOCAB), config, World())


def batches(count: int, kind: str = "gpt") -> List[Any]:
    draw = np.random.RandomState(0)
    if kind == "mlp":
        return [(draw.rand(2, 64).astype(np.float32), draw.randint(0, 10, (2,)).astype(np.int32)) for _ in range(count)]
    return [tuple(draw.randint(0, VOCAB, (2, 16)).astype(np.int32) for _ in "xy") for _ in range(count)]


def assert_same(one: Any, other: Any) -> None:
    for (name, p), q in zip(one.model.named_parameters(), other.model.parameters()):
        assert torch.equal(p, q), name
        mine, theirs = one.optimizer.state[p], other.optimizer.state[q]
        assert mine.keys() == theirs.keys() and (mine or one.config.optimizer.kind == "sgd"), name
        for key, value in mine.items():
            same = torch.equal(value, theirs[key]) if torch.is_tensor(value) else value == theirs[key]
            assert same, (name, key)


PURE = {"precision": "bf16-pure"}
VARIANTS: Dict[str, Any] = {
    "reversible kahan": PURE,
    "split": {**PURE, "optimizer": {"summation": "split"}},
    "stochastic": {**PURE, "optimizer": {"summation": "stochastic", "variance": "stochastic"}},
    "none": {**PURE, "optimizer": {"summation": "none"}},
    "wide variance": {**PURE, "optimizer": {"betas": [0.9, 0.999]}},
    "residual, untied": {**PURE, "model": {"stack": {"kind": "residual"}, "tied": False}},
    "shared layers": {**PURE, "model": {"depth": 4, "num_hidden_groups": 2}},
    "momentum": {**PURE, "model": {"stack": {"coupling": "momentum"}}, "memory": {"allow_ill_conditioned": True}},
    "affine": {"model": {"stack": {"coupling": "affine"}}, "memory": {"allow_ill_conditioned": True}},
    "checkpoints": {**PURE, "memory": {"engine": "checkpoint"}},
    "levers": {**PURE, "memory": {"ffn_chunk": 8, "attention_heads_at_once": 1, "keep_last": 1}},
    "loss in chunks": {**PURE, "memory": {"loss_chunk": 8}, "model": {"dropout": 0.1}},
    "hashed, local": {**PURE, "model": {"attention": ["lsh", "local"], "lsh": {"chunk": 4}, "local": {"chunk": 4}}},
    "fp32 adamw": {},
    "fp32 adam": {"optimizer": {"kind": "adam"}},
    "fp32 sgd": {"optimizer": {"kind": "sgd", "momentum": 0.9, "lr": 0.01}},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "standard parametrisation": {**PURE, "mup": {"parametrization": "standard"}},
    "mlp": {**PURE, "model": {"kind": "mlp"}},
}


@needs_hooks
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_bits_as_an_update_afterwards(variant: str) -> None:
    plain, fused = make(False, **VARIANTS[variant]), make(True, **VARIANTS[variant])
    start = [p.detach().clone() for p in plain.model.parameters()]
    kind = plain.config.model.kind
    for batch in batches(4, kind):
        results = []
        for engine in (plain, fused):
            torch.manual_seed(1)
            results.append(engine.train_step(batch))
        assert results[0] == results[1]
        assert results[0].grad_norm > 0
    assert all(p.grad is None for p in fused.model.parameters())
    moved = [not torch.equal(a, b) for a, b in zip(start, plain.model.parameters())]
    assert all(moved) or variant == "none"
    assert_same(plain, fused)


@needs_hooks
def test_gradients_are_never_all_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any moment those that wait and one more; in the hook of an unfused engine: all of them."""
    engine = make(True, **PURE, model={"depth": 4})
    parameters = list(engine.model.parameters())
    alive: List[int] = []
    def watch() -> int:
        return sum(p.grad.numel() for p in parameters if p.grad is not None)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda _: alive.append(watch()))
    measure = engine.fused.measure
    engine.fused.measure = lambda gradient: (alive.append(watch()), measure(gradient))[1]
    engine.train_step(batches(1)[0])
    small = sum(p.numel() for p in parameters if p.numel() < fused_module.WAITING)
    largest = max(p.numel() for p in parameters)
    assert len(alive) == 2 * len(parameters)
    assert max(alive) <= small + largest < sum(p.numel() for p in parameters) / 4
    assert all(p.grad is None for p in parameters)


@needs_hooks
@pytest.mark.parametrize("others", [True, False])
def test_it_goes_on_bit_for_bit_with_or_without(others: bool) -> None:
    """Six updates in one go, and three and three through files; the second half fused or not."""
    straight, first, second = make(True, **PURE), make(True, **PURE), make(others, **PURE)
    given = batches(6)
    in_two_halves(straight, first, second, given)
    assert_same(straight, second)


@needs_hooks
def test_a_run_stops_and_goes_on(zygote: Any, tmp_path: Path) -> None:
    """Begun fused and ended unfused: the same files as those of an unfused run in one go."""
    yaml = write_yaml(tmp_path, precision="bf16-pure", batch={"micro": 2, "accumulation": 1}, train={"clip": None})
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert zygote.run(["train", yaml, "--out", whole]).code == 0
    begun = zygote.run(["train", yaml, "memory.fused_update=true", "train.steps=8", "schedule.steps=12", "--out", halves])
    assert begun.code == 0, begun.err
    ended = zygote.run(["resume", halves, "train.steps=12", "memory.fused_update=false"])
    assert ended.code == 0, ended.err
    end = "checkpoints/step-00000012"
    for name in ("model.safetensors", "optimizer.pt"):
        assert (whole / end / name).read_bytes() == (halves / end / name).read_bytes(), name
    assert timeless(whole / "metrics.jsonl") == timeless(halves / "metrics.jsonl")


@needs_hooks
def test_other_backward_passes_change_nothing() -> None:
    """A study measures the peak with one."""
    engine = make(True, **PURE)
    before = [p.detach().clone() for p in engine.model.parameters()]
    assert peak_megabytes(engine, batches(1)[0]) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters()))
    assert not any(engine.optimizer.state.values())
    engine.train_step(batches(1)[0])
    assert not all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters()))
    engine.close()
    engine.wrapped(*engine._tensors(batches(1)[0]))[0].backward()
    assert all(p.grad is not None for p in engine.model.parameters())


@needs_hooks
def test_a_loss_that_is_not_finite_moves_nothing() -> None:
    engine = make(True, **PURE)
    with torch.no_grad():
        engine.model.norm.weight.fill_(float("nan"))
    before = [p.detach().clone() for p in engine.model.parameters()]
    with pytest.raises(RunError, match="the loss is nan at step 1"):
        engine.train_step(batches(1)[0])
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters()) if not a.isnan().any())
    engine = make(True, **PURE)
    next(engine.model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(RunError, match="norm is .* at step 1; these weights are spoilt"):
        engine.train_step(batches(1)[0])


class Own(torch.optim.SGD):
    """A user's optimizer."""


@needs_hooks
def test_refusals() -> None:
    engine = make(True)
    with pytest.raises(ConfigError, match="Own is not known to update each tensor"):
        TorchEngine(TrainStep(engine.model), lambda m: Own(m.parameters(), lr=0.1), Schedule(), engine.config)
    world = World()
    world.size = 2
    config = engine.config.model_copy(update={"batch": engine.config.batch.model_copy(update={"replicas": 2})})
    with pytest.raises(ConfigError, match="2 processes"):
        engine.world = world
        engine._fuse()
    assert config.batch.replicas == 2


@pytest.mark.pod
def test_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.Tensor, "register_post_accumulate_grad_hook", raising=False)
    config = make_config(memory={"fused_update": True}, mup={"base_width": 64}, train={"clip": None})
    with pytest.raises(EnvironmentProblem, match="torch 2.1 or newer") as caught:
        check_precision(config)
    assert caught.value.exit_code == 3
    check_precision(config, training=False)
    with pytest.raises(EnvironmentProblem, match="torch 2.1 or newer"):
        make_engine(build_model(config, VOCAB), config, World())
