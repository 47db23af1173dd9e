"""The surrogate step trains as the plain one does: gradients, updates, fp16, replicas, several IPUs."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.config import Config
from ipu_lean.ipu import SurrogateStep, make_optimizer, make_options, make_step, place, to_precision
from ipu_lean.models import TrainStep
from tests.ipu.helpers import batch_for, ipu_config, lively

pytestmark = pytest.mark.pod

UNTIED = {"tied": False}
MODELS: Dict[str, Dict[str, Any]] = {
    "quickstart": {},
    "untied, rmsnorm, swiglu, sandwich": {**UNTIED, "norm": "rmsnorm", "activation": "swiglu", "sandwich": True},
    "learned positions, no bias, relu": {"positions": "learned", "bias": False, "activation": "relu", "stack": {"output": "y"}},
    "dropout": {"dropout": 0.2, "attention_dropout": 0.1, "embedding_dropout": 0.1},
    "shared layers": {"num_hidden_groups": 1, "num_inner_groups": 2},
    "aaff, sum": {"stack": {"order": "aaff", "output": "sum"}},
    "split, concatenated": {**UNTIED, "heads": 1, "stack": {"input": "split", "output": "concat"}},
    "zeros, a learned gate": {"stack": {"input": "zeros", "output": "gate-channels"}},
    "momentum": {"stack": {"coupling": "momentum", "beta": 0.8}},
    "modified momentum": {"stack": {"coupling": "modified-momentum", "beta": 0.8}},
    "mean, shared layers": {"num_hidden_groups": 1, "stack": {"coupling": "mean"}},
    "mean by the global index, sinusoidal positions, silu": {
        "positions": "sinusoidal",
        "activation": "silu",
        "stack": {"coupling": "mean", "index": "global", "output": "gate"},
    },
    "affine": {"stack": {"coupling": "affine"}},
    "exact": {"stack": {"exact": True, "exact_bits": 6}},
}


def surrogate_config(**changes: Any) -> Config:
    """One IPU, three micro-batches of two rows, two updates a call."""
    base = {
        "memory": {"ipu_backward": "surrogate"},
        "ipu": {"layers_per_ipu": [4]},
        "batch": {"micro": 2, "accumulation": 3, "device_iterations": 2},
        "train": {"steps": 50, "eval_every": 50, "save_every": 50},
    }
    for key, value in changes.items():
        base[key] = {**base[key], **value} if isinstance(base.get(key), dict) and isinstance(value, dict) else value
    return ipu_config(**base)


def plain(model: nn.Module) -> TrainStep:
    """The step in plain autograd, everything stored."""
    model.set_attention("explicit")
    model.set_loss(chunk=model.loss_chunk, plain=True)
    model.layers.engine = "store"
    return TrainStep(model)


def micro_batch(config: Config, seed: int = 0) -> Tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(array)[: config.batch.micro] for array in batch_for(config, 1, seed))


def check_gradients(config: Config) -> None:
    """The surrogate step's against plain autograd's, in float64, dropout included: both draw the same masks in the same order."""
    wanted, found = lively(config).double(), lively(config).double()
    step = SurrogateStep(found, poptorch, config)
    batch = micro_batch(config)
    torch.manual_seed(0)
    loss, sums = plain(wanted)(*batch)
    loss.backward()
    torch.manual_seed(0)
    own, own_sums, marked = step(*batch)
    marked.backward()
    torch.testing.assert_close(own, loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(own_sums, sums, rtol=1e-6, atol=0)
    for (path, one), other in zip(wanted.named_parameters(), found.parameters()):
        if float(one.grad.norm()) < 1e-12:
            assert "key.linear.bias" in path and float(other.grad.norm()) < 1e-12, path
            continue
        assert float((one.grad - other.grad).norm() / one.grad.norm()) < 1e-10, path


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_plain_autograd(name: str) -> None:
    check_gradients(surrogate_config(model=MODELS[name], memory={"ipu_backward": "surrogate", "loss_chunk": 5}))


def train(mode: str, updates: int, seed: int = 1, **changes: Any) -> Tuple[List[float], Dict[str, torch.Tensor]]:
    """(loss of each update, weights) after training on the emulator."""
    config = surrogate_config(**{**changes, "memory": {"ipu_backward": mode}})
    model = to_precision(lively(config, seed), config)
    step, placement = make_step(model, config, poptorch), place(model, config, poptorch)
    optimizer = make_optimizer(model, config, poptorch)
    executor = poptorch.trainingModel(step, make_options(config, poptorch).train, optimizer)
    losses: List[float] = []
    iterations = config.batch.device_iterations
    for call in range(updates // iterations):
        loss = executor(*[torch.from_numpy(array) for array in batch_for(config, iterations, call)])[0]
        losses += loss.double().reshape(iterations, -1).mean(1).tolist()
    executor.copyWeightsToHost()
    weights = {name: tensor.detach().as_subclass(torch.Tensor).clone() for name, tensor in model.named_parameters()}
    executor.destroy()
    placement.remove()
    return losses, weights


def compare(one: Any, other: Any) -> Tuple[float, float]:
    """Largest differences of the losses and of the weights; the key's bias, whose gradient is nearly zero, is left out."""
    assert one[0][-1] < one[0][0]
    gaps = {name: float((one[1][name] - other[1][name]).abs().max()) for name in one[1] if "key.linear.bias" not in name}
    return max(abs(a - b) for a, b in zip(one[0], other[0])), max(gaps.values())


def test_fifty_updates_are_those_of_plain_training() -> None:
    """AdamW, accumulation 3, two device iterations, loss scaling, clipping."""
    changes = {"train": {"clip": 1.0}, "ipu": {"loss_scaling": 8.0}, "optimizer": {"lr": 1e-3, "weight_decay": 0.1}}
    loss, weights = compare(train("recompute", 50, **changes), train("surrogate", 50, **changes))
    assert loss < 1e-6
    assert weights < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9}, "batch": {"replicas": 2}},
        {
            "optimizer": {"kind": "adam", "weight_decay": 0.0},
            "model": {"num_hidden_groups": 1, "dropout": 0.1, "attention_dropout": 0.1},
        },
        {"ipu": {"layers_per_ipu": [2, 2], "execution": "sharded"}, "model": {"stack": {"coupling": "momentum"}}},
    ],
    ids=["SGD, replicas", "Adam, dropout, shared layers", "two IPUs one after another"],
)
def test_other_ways_to_train(changes: Dict[str, Any]) -> None:
    loss, weights = compare(train("recompute", 6, **changes), train("surrogate", 6, **changes))
    assert loss < 2e-6
    assert weights < 1e-5


def test_frozen_parameters_stay() -> None:
    config = surrogate_config()
    model = lively(config)
    frozen = dict(model.named_parameters())["layers.blocks.1.branches.1.feed_forward.up.linear.weight"]
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    marked = SurrogateStep(model, poptorch, config)(*micro_batch(config))[2]
    marked.backward()
    assert frozen.grad is None and torch.equal(frozen, before)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


# fp16.


def half_gradients(config: Config, step: nn.Module, batch: Tuple[torch.Tensor, ...], scale: float) -> Dict[str, torch.Tensor]:
    """One micro-batch's gradients as the device has them, loss scaling still in: a huge SGD step would round them."""
    executor = poptorch.trainingModel(step, _one(), make_optimizer(step.model, config, poptorch))
    executor.compile(*batch)
    executable = executor._executable
    loss = executable._micro(0, 0, 0, [[tensor] for tensor in batch])[0]
    loss.backward(torch.full_like(loss, scale))
    found = {name: parameter.grad.float() for name, parameter in executable.parameters.items()}
    executor.destroy()
    return found


def _one() -> Any:
    return poptorch.Options()


def test_fp16_gradients_carry_the_loss_scale_and_nothing_is_lost() -> None:
    """Beside float64: as near as plain fp16 training. Small gradients survive the walk, and the scale does not overflow."""
    scale = 4096.0
    section = {"emulate_precision": True, "loss_scaling": scale / 2}  # the width is twice its base
    config = surrogate_config(precision="fp16-ipu", ipu=section)
    batch = micro_batch(config)
    exact = to_precision(lively(config), config).double()
    plain(exact)(*batch)[0].backward()
    gaps = {}
    for mode in ("recompute", "surrogate"):
        own = surrogate_config(precision="fp16-ipu", ipu=section, memory={"ipu_backward": mode})
        found = half_gradients(own, make_step(to_precision(lively(own), own), own, poptorch), batch, scale)
        assert all(bool(torch.isfinite(gradient).all()) for gradient in found.values())
        gaps[mode] = {
            name: float((found[f"model.{name}"] / scale - p.grad).norm() / p.grad.norm())
            for name, p in exact.named_parameters()
            if "key.linear.bias" not in name
        }
    for name, gap in gaps["surrogate"].items():
        assert gap < 2 * gaps["recompute"][name] + 1e-3, name
    assert max(gaps["surrogate"].values()) < 0.02


def test_fp16_trains_like_plain_fp16() -> None:
    changes = {"precision": "fp16-ipu", "ipu": {"emulate_precision": True, "stochastic_rounding": False}}
    loss, _ = compare(train("recompute", 6, **changes), train("surrogate", 6, **changes))
    assert loss < 5e-3
