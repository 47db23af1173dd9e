"""Compiled branches: the numbers of plain ones, the same code in the second run, and a way on where nothing can be compiled."""

from __future__ import annotations

import copy
import shutil

import numpy as np
import pytest
import torch

from ipu_lean._compat import TORCH
from ipu_lean.config import make_config
from ipu_lean.errors import ConfigError
from ipu_lean.models import TrainStep, build_model
from ipu_lean.train import branches
from ipu_lean.train.engines import make_engine
from ipu_lean.train.world import World

compiles = pytest.mark.skipif(TORCH < (2, 2) or shutil.which("g++") is None, reason="needs torch 2.2 and a C++ compiler")
MODEL = {"width": 16, "depth": 2, "heads": 2, "seq": 12, "vocab": 257}


def config_of(**sections):
    model = {**MODEL, **sections.pop("model", {})}
    train = {"compile": "branches", "steps": 4, **sections.pop("train", {})}
    mup = {"base_width": 16, "query_zero_init": False}
    return make_config(model=model, train=train, mup=mup, batch={"micro": 2}, schedule={"warmup": 0}, **sections)


def trained(config, updates=3, say=lambda text: None):
    """(losses, weights) after some updates, with the same generator whatever the engine did before."""
    engine = make_engine(build_model(config), config, World(), say)
    torch.manual_seed(0)
    rows = np.random.default_rng(0).integers(0, 257, (updates, 2, 13)).astype(np.int32)
    losses = [engine.train_step((row[:, :-1].copy(), row[:, 1:].copy())).loss for row in rows]
    return losses, engine.sync_to_host()


def assert_near(one, two, tolerance):
    assert one[0] == pytest.approx(two[0], rel=tolerance)
    for name, weight in one[1].items():
        if name.endswith("key.linear.bias") or not weight.is_floating_point():
            continue  # the gradient of a key's bias is zero but for rounding, which Adam scales up
        assert (weight - two[1][name]).norm() <= tolerance * weight.norm().clamp(min=1e-3), name


@pytest.fixture(autouse=True)
def fresh():
    if TORCH >= (2, 2):
        torch._dynamo.reset()


@pytest.fixture
def quick(monkeypatch):
    """Traced and differentiated by torch's compiler, and run without generated code."""
    monkeypatch.setattr(branches, "BACKEND", "aot_eager")


@compiles
@pytest.mark.parametrize(
    ("engine", "precision", "model"),
    [
        ("store", "fp32", {"dropout": 0.2}),
        ("invert", "fp32", {"attention": "explicit", "attention_dropout": 0.2, "num_hidden_groups": 1}),
        ("invert", "bf16-mixed", {"dropout": 0.2}),
        ("checkpoint", "bf16-mixed", {"depth": 1}),
        ("invert", "fp32", {"attention": ["local", "full"], "local": {"chunk": 8}, "positions": "axial"}),
    ],
)
def test_the_numbers_of_plain_branches(quick, engine, precision, model):
    sections = {"memory": {"engine": engine}, "precision": precision, "model": model}
    plain = trained(config_of(train={"compile": "none"}, **sections))
    assert_near(plain, trained(config_of(**sections)), 1e-5 if precision == "fp32" else 2e-2)


@compiles
def test_generated_code():
    said = []
    sections = {"model": {"dropout": 0.2, "depth": 1}}
    found = trained(config_of(**sections), say=said.append)
    assert_near(trained(config_of(train={"compile": "none"}, **sections)), found, 1e-4)
    assert len(said) == 1 and "2 branches compiled in" in said[0]


@compiles
@pytest.mark.parametrize("engine", ["invert", "checkpoint"])
def test_the_second_run_is_the_same_code(quick, engine):
    """After the warm-up nothing is compiled any more, neither in the first nor in the second run, and nothing is cut in two."""
    torch._dynamo.utils.counters.clear()  # what other tests of this process left
    config = config_of(memory={"engine": engine})
    model = build_model(config)
    made = make_engine(model, config, World())
    counted = dict(torch._dynamo.utils.counters["stats"])
    batch = np.zeros((2, 12), np.int32)
    made.train_step((batch, batch))
    made.eval_step((batch, batch))
    assert counted["unique_graphs"] > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counted["unique_graphs"]
    assert not torch._dynamo.utils.counters["graph_break"]


@compiles
def test_recomputed_streams_without_gradients_use_the_compiled_code_too(quick):
    """torch.autograd.grad for the first branch only: later ones run for the streams alone."""
    config = config_of(train={"compile": "branches"})
    model = build_model(config)
    make_engine(model, config, World())
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    last = model.layers.executed()[-1].branches[0]
    last.requires_grad_(False)
    h = model.layers(torch.randn(2, 12, 16))
    torch.autograd.grad(h.pow(2).sum(), [model.layers.executed()[0].branches[0].attention.out.linear.weight])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiled <= 2  # the frozen branch's own


@compiles
def test_names_stay_and_the_warm_up_leaves_no_trace(quick):
    config = config_of(model={"dropout": 0.2})
    model = build_model(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    make_engine(model, config, World())
    assert torch.equal(state, torch.get_rng_state()) and model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert list(before) == list(build_model(config_of(train={"compile": "none"})).state_dict())


def test_without_a_compiler_everything_runs_all_the_same(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = []
    found = trained(config_of(), say=said.append)
    assert len(said) == 1 and "uncompiled" in said[0] and ("no-such-compiler" in said[0] or "too old" in said[0])
    plain = trained(config_of(train={"compile": "none"}))
    assert found[0] == plain[0] and all(torch.equal(found[1][name], plain[1][name]) for name in plain[1])


@compiles
def test_a_run_that_goes_on_rounds_as_one_that_was_not_stopped(quick):
    config = config_of(model={"depth": 1, "dropout": 0.2})
    rows = np.random.default_rng(0).integers(0, 257, (4, 2, 12)).astype(np.int32)

    def steps(engine, part):
        return [engine.train_step((row, row)).loss for row in part]

    whole = make_engine(build_model(config), config, World())
    torch.manual_seed(0)
    losses = steps(whole, rows[:2])
    state, weights = torch.get_rng_state(), {name: t.clone() for name, t in whole.sync_to_host().items()}
    optimizer, update = copy.deepcopy(whole.optimizer_state()), whole.state_dict()
    losses = steps(whole, rows[2:])
    model = build_model(config)
    model.load_state_dict(weights)
    again = make_engine(model, config, World())
    again.load_optimizer_state(optimizer)
    again.load_state_dict(update)
    torch.set_rng_state(state)
    assert steps(again, rows[2:]) == losses


@compiles
def test_a_compiler_that_fails_is_given_up():
    model, said = build_model(config_of()), []

    def breaks():
        raise RuntimeError("g++ crashed")

    assert not branches.compile_branches(model, "cpu", breaks, said.append)
    assert "g++ crashed" in said[0] and all(branch._compiled_call_impl is None for branch in branches.branches_of(model))
    TrainStep(model)(*(torch.zeros(2, 12, dtype=torch.int32),) * 2)[0].backward()


@pytest.mark.parametrize(
    "sections",
    [
        {"device": "ipu-emulated"},
        {"memory": {"ffn_chunk": 8}},
        {"memory": {"attention_heads_at_once": 1}},
        {"train": {"strategy": "fsdp"}},
        {"model": {"attention": "lsh"}},
    ],
)
def test_refused(sections):
    with pytest.raises(ConfigError) as caught:
        config_of(**sections)
    assert caught.value.key == "train.compile"
