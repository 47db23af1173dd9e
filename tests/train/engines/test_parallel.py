"""Two gloo processes train as one does: DDP and FSDP, clipping, and states that fit a world of any size."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ipu_lean.config import Config, make_config
from ipu_lean.models import TrainStep, build_model
from ipu_lean.optim import build_optimizer, build_schedule
from ipu_lean.train.engines import TorchEngine
from ipu_lean.train.world import World
from tests.train.helpers import sections, write_corpus

pytestmark = pytest.mark.pod
STEPS, SPLIT = 4, 2


def config_of(folder: Path, strategy: str, tied: bool, stack: str = "reversible") -> Config:
    train = {
        "steps": STEPS,
        "strategy": strategy,
        "processes": 1,
        "clip": 0.05,
        "eval_every": 0,
        "save_every": 1,
        "sample": {"tokens": 0},
    }
    model = {"dropout": 0.0, "tied": tied, "stack": {"kind": stack}}
    # Queries and readout start at zero under muP; drawn at random, every tensor has a gradient from the first step.
    mup = {"query_zero_init": False, "readout_zero_init": False}
    return make_config(
        **sections(folder, model=model, mup=mup, train=train, batch={"micro": 2, "accumulation": 2, "replicas": 2})
    )


def batches(count: int) -> List[Any]:
    draw = np.random.RandomState(0)
    return [tuple(draw.randint(0, 257, (8, 16)).astype(np.int32) for _ in range(2)) for _ in range(count)]


def make_engine(config: Config, world: World, weights: Any = None) -> TorchEngine:
    model = build_model(config, 257)
    if weights is not None:
        model.load_state_dict(weights)
    return TorchEngine(TrainStep(model), lambda m: build_optimizer(m, config), build_schedule(config), config, world)


def train(config: Config, world: World, start: int, stop: int, saved: Any = None) -> Dict[str, Any]:
    """Steps `start` .. `stop`, from `saved` if given; everything a checkpoint would hold, and what the steps said."""
    engine = make_engine(config, world, saved["weights"] if saved else None)
    if saved:
        engine.load_optimizer_state(saved["optimizer"])
        engine.load_state_dict(saved["engine"])
    results = [engine.train_step(world.rows(batch, config)) for batch in batches(STEPS)[start:stop]]
    evaluated = engine.eval_step(world.rows(batches(STEPS)[0], config))
    return {
        "losses": [one.loss for one in results],
        "norms": [one.grad_norm for one in results],
        "sums": [one.sums for one in results],
        "tokens": [one.tokens for one in results],
        "weights": engine.sync_to_host(),
        "optimizer": engine.optimizer_state(),
        "engine": engine.state_dict(),
        "evaluated": world.sum(evaluated.tolist()),
    }


def work(rank: int, port: int, folder: str, jobs: List[Any], saved: Any) -> None:
    """One of two processes: every job in turn, results of the first rank to a file each."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for name, strategy, tied, stack in jobs:
        config = config_of(Path(folder), strategy, tied, stack)
        world = World.current(config)
        whole = train(config, world, 0, STEPS)
        half = train(config, world, 0, SPLIT)
        resumed = train(config, world, SPLIT, STEPS, saved[tied, stack])
        if rank == 0:
            torch.save({"whole": whole, "half": half, "resumed": resumed}, os.path.join(folder, f"{name}.pt"))
    dist.barrier()
    os._exit(0)  # with torch 2.0.1, gloo now and then never returns from taking down a group whose other end is gone


def fsdp_works_here() -> bool:
    from ipu_lean._compat import TORCH

    return TORCH >= (2, 6)


JOBS = [("ddp-tied", "ddp", True, "reversible"), ("ddp-untied", "ddp", False, "residual")]
if fsdp_works_here():
    JOBS += [("fsdp-tied", "fsdp", True, "reversible"), ("fsdp-untied", "fsdp", False, "residual")]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: Any) -> Any:
    """({job: results of two processes}, {(tied, stack): results of one})."""
    folder = tmp_path_factory.mktemp("pairs")
    write_corpus(folder / "corpus.txt")
    alone = {}
    for _, _, tied, stack in JOBS:
        config = config_of(folder, "single", tied, stack)
        alone[tied, stack] = (train(config, World(), 0, STEPS), train(config, World(), 0, SPLIT))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, (port, str(folder), JOBS, {key: half for key, (_, half) in alone.items()}), nprocs=2)
    found = {name: torch.load(folder / f"{name}.pt", **_whole_file()) for name, *_ in JOBS}
    return folder, found, alone


def _whole_file() -> Dict[str, Any]:
    return {"weights_only": False}


def assert_same(one: Dict[str, Any], other: Dict[str, Any]) -> None:
    """Losses, norms and weights within float32 rounding (1e-5, norms per tensor)."""
    for key in ("losses", "norms", "sums", "evaluated"):
        assert np.allclose(one[key], other[key], rtol=1e-5), key
    assert one["tokens"] == other["tokens"] and one["weights"].keys() == other["weights"].keys()
    for name, value in other["weights"].items():
        assert value.shape == one["weights"][name].shape
        if value.is_floating_point() and not name.endswith("key.linear.bias"):  # a key's bias has no gradient, only rounding
            assert float((value - one["weights"][name]).norm() / value.norm()) < 1e-5, name


@pytest.mark.parametrize("name, tied, stack", [(name, tied, stack) for name, _, tied, stack in JOBS])
def test_two_processes_equal_one(pairs: Any, name: str, tied: bool, stack: str) -> None:
    _, found, alone = pairs
    assert_same(found[name]["whole"], alone[tied, stack][0])
    assert all(norm > 0.05 for norm in found[name]["whole"]["norms"]), "clipping was to have an effect"


@pytest.mark.parametrize("name, tied, stack", [(name, tied, stack) for name, _, tied, stack in JOBS])
def test_a_state_of_one_goes_on_with_two_and_back(pairs: Any, name: str, tied: bool, stack: str) -> None:
    folder, found, alone = pairs
    whole, _ = alone[tied, stack]
    tail = {key: value[SPLIT:] if isinstance(value, list) and len(value) == STEPS else value for key, value in whole.items()}
    assert_same(found[name]["resumed"], tail)
    back = train(config_of(folder, "single", tied, stack), World(), SPLIT, STEPS, found[name]["half"])
    assert_same(back, tail)


@pytest.mark.parametrize("name, tied, stack", [(name, tied, stack) for name, _, tied, stack in JOBS])
def test_gathered_optimizer_state_has_every_tensor_whole(pairs: Any, name: str, tied: bool, stack: str) -> None:
    _, found, alone = pairs
    state, expected = found[name]["whole"]["optimizer"], alone[tied, stack][0]["optimizer"]
    assert state["state"].keys() == expected["state"].keys()
    assert [group["params"] for group in state["groups"]] == [group["params"] for group in expected["groups"]]
    for parameter, entry in expected["state"].items():
        assert entry.keys() == state["state"][parameter].keys()
        for key, value in entry.items():
            assert value.shape == state["state"][parameter][key].shape
            if not parameter.endswith("key.linear.bias"):
                assert float(value.norm()) > 0, "a state of zeros compares nothing"
                assert float((value - state["state"][parameter][key]).norm() / value.norm()) < 1e-4, (parameter, key)
