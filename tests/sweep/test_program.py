"""The stacked gradient beside plain autograd, in float64."""

from __future__ import annotations

import pytest
import torch

from ipu_lean.models import TrainStep, build_model
from ipu_lean.sweep.program import StackedGradient, plain_config
from tests.models.common import config_of, tiny, tokens_for

pytestmark = pytest.mark.pod

MODELS = {
    "reversible": {"memory": {"engine": "store"}},
    "momentum": {"stack": {"coupling": "momentum", "beta": 0.8}, "memory": {"engine": "store"}},
    "gated output": {"stack": {"output": "gate"}, "memory": {"engine": "store"}},
    "affine, split": {"stack": {"coupling": "affine", "input": "split"}, "memory": {"engine": "store"}},
    "residual, untied": {"stack": {"kind": "residual"}, "tied": False},
    "sandwich, rmsnorm, swiglu, sinusoidal": {
        "sandwich": True,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "positions": "sinusoidal",
        "bias": False,
        "memory": {"engine": "store"},
    },
    "shared layers, learned positions": {"num_hidden_groups": 1, "positions": "learned", "memory": {"engine": "store"}},
}


def stacked(models):
    named = [dict(TrainStep(model).named_parameters()) for model in models]
    return {name: torch.stack([one[name].detach() for one in named]) for name in named[0]}


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_each_model_alone(name):
    models = [tiny(**MODELS[name]).double() for _ in range(3)]
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    batches = [tokens_for(models[0], seed=seed) for seed in range(3)]
    inputs, labels = (torch.stack([batch[i] for batch in batches]) for i in (0, 1))
    buffers = {f"model.{key}": buffer for key, buffer in models[0].named_buffers()}
    weights = stacked(models)
    program = StackedGradient(TrainStep(models[0]), weights, buffers, {}, inputs, labels)
    for _ in range(2):  # a program is replayed: with other weights it gives other numbers
        losses, gradients = program(weights, buffers, {}, inputs, labels)
        for row, model in enumerate(models):
            model.zero_grad()
            loss, _ = TrainStep(model)(*batches[row])
            loss.backward()
            assert losses[row].item() == pytest.approx(loss.item(), rel=1e-12)
            for (place, parameter), gradient in zip(TrainStep(model).named_parameters(), gradients):
                size = parameter.grad.norm()
                if not place.endswith("key.linear.bias"):  # the softmax does not see it without rotary positions
                    assert size > 0, place
                    assert (gradient[row] - parameter.grad).norm() < 1e-10 * size, place
        with torch.no_grad():
            for model in models:
                for parameter in model.parameters():
                    parameter.mul_(1.1)
        weights = stacked(models)


def test_buffers_of_their_own_are_read():
    """Sinusoidal tables are as large as the embedding, which may differ between trials."""
    models = [tiny(positions="sinusoidal", memory={"engine": "store"}).double() for _ in range(2)]
    table = "model.embedding.position.table"
    own = {table: torch.stack([models[0].embedding.position.table, 3.0 * models[0].embedding.position.table])}
    models[1].embedding.position.table.mul_(3.0)
    x, y = tokens_for(models[0])
    inputs, labels = torch.stack([x, x]), torch.stack([y, y])
    program = StackedGradient(TrainStep(models[0]), stacked(models), {}, own, inputs, labels)
    losses, _ = program(stacked(models), {}, own, inputs, labels)
    assert losses.tolist() == pytest.approx([TrainStep(model)(x, y)[0].item() for model in models], rel=1e-12)
    assert losses[0] != losses[1]


def test_nothing_is_recomputed_in_a_program():
    config = config_of(memory={"engine": "invert", "loss_chunk": 4})
    assert config.memory.engine == "invert"
    assert build_model(plain_config(config)).layers.engine == "store"
