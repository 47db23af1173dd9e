"""The MLP against its formula in float64, against the mup package, and as a model that every device takes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
import torch
from torch import nn

from ipu_lean.config import Config
from ipu_lean.errors import ConfigError
from ipu_lean.models import MLP, TrainStep, build_meta, build_model
from ipu_lean.optim import build_optimizer
from tests.data.images.helpers import image_config

pytestmark = pytest.mark.pod


def awake(config: Config) -> Any:
    """The configured model with a readout that is not zero."""
    model = build_model(config, 3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batch(rows: int = 12) -> Any:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(rows, 16, generator=generator), torch.randint(0, 3, (rows,), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("depth, bias, activation", [(1, True, "relu"), (2, True, "gelu"), (3, False, "silu")])
def test_forward_and_gradients_are_the_formulas(tmp_path: Path, depth: int, bias: bool, activation: str) -> None:
    changes = {"depth": depth, "bias": bias, "activation": activation, "width": 24}
    model = awake(image_config(tmp_path, model=changes, mup={"base_width": 8, "output_mult": 1.5}, memory={"loss_chunk": 5}))
    images, labels = batch()
    loss, sums = TrainStep(model)(images, labels)
    loss.backward()

    twin = {name: parameter.detach().double().requires_grad_() for name, parameter in model.named_parameters()}
    act = {"relu": torch.relu, "silu": lambda x: x * torch.sigmoid(x)}.get(
        activation, lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    )
    h = images.double()
    for place in range(depth):
        h = h @ twin[f"layers.{place}.linear.weight"].T
        h = act(h + twin[f"layers.{place}.linear.bias"] if bias else h)
    logits = 1.5 * (h / 3) @ twin["readout.weight"].T  # width 24 over base width 8
    logits = logits + twin["readout.bias"] if bias else logits
    wanted = -torch.log_softmax(logits, -1)[torch.arange(12), labels.long()]
    wanted.mean().backward()
    assert loss.item() == pytest.approx(wanted.mean().item(), rel=1e-6)
    assert sums.tolist() == pytest.approx([wanted.sum().item(), (logits.argmax(-1) == labels).sum().item(), 12], rel=1e-6)
    for name, parameter in model.named_parameters():
        reference = twin[name].grad
        assert reference.norm() > 0
        assert (parameter.grad - reference).norm() / reference.norm() < 1e-5, name


def mup_twin(width: int) -> Any:
    """The same network by the mup package, its base at width 8."""
    mup = pytest.importorskip("mup", reason="the mup package is the reference")

    def make(size: int) -> nn.Module:
        return nn.Sequential(nn.Linear(16, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), mup.MuReadout(size, 3))

    model = make(width)
    mup.set_base_shapes(model, make(8), delta=make(16))
    return mup, model


NAMES = {"layers.0.linear": "0", "layers.1.linear": "2", "readout": "4"}


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_trains_as_the_mup_package_does(tmp_path: Path, kind: str) -> None:
    own: Dict[str, Any] = {"kind": kind, "lr": 0.01 if kind == "adam" else 0.1, "weight_decay": 0.0}
    if kind == "adam":
        own["eps"] = 1e-30  # the package leaves eps alone, ours follows the width
    config = image_config(tmp_path, model={"width": 64}, optimizer=own)
    model, (mup, twin) = awake(config).double(), mup_twin(64)
    twin.double()  # Adam makes a step of a rounding error
    with torch.no_grad():
        theirs = dict(twin.named_parameters())
        for name, parameter in model.named_parameters():
            layer, _, leaf = name.rpartition(".")
            theirs[f"{NAMES[layer]}.{leaf}"].copy_(parameter)
    optimizer = build_optimizer(model, config)
    if kind == "adam":
        other = mup.MuAdam(twin.parameters(), lr=0.01, betas=tuple(config.optimizer.betas), eps=1e-30)
    else:
        other = mup.MuSGD(twin.parameters(), lr=0.1)
    images, labels = batch()
    images = images.double()
    for _ in range(6):
        for parameters, loss in ((optimizer, TrainStep(model)(images, labels)[0]), (other, None)):
            loss = nn.functional.cross_entropy(twin(images), labels.long()) if loss is None else loss
            parameters.zero_grad()
            loss.backward()
            parameters.step()
    for name, parameter in model.named_parameters():
        layer, _, leaf = name.rpartition(".")
        wanted = theirs[f"{NAMES[layer]}.{leaf}"]
        assert (parameter - wanted).norm() / wanted.norm() < 1e-8, name


def test_roles_and_starts(tmp_path: Path) -> None:
    model = build_model(image_config(tmp_path, model={"width": 64}), 3)
    kinds = {name: (role.kind, role.m_in, role.m_out, role.forward_mult) for name, role in model.roles.items()}
    assert kinds["layers.0.linear.weight"] == ("input", 1, 8, 1)
    assert kinds["layers.1.linear.weight"] == ("hidden", 8, 8, 1)
    assert kinds["readout.weight"] == ("readout", 8, 1, 0.125)
    assert {role.depth_mult for role in model.roles.values()} == {1}
    assert not model.readout.weight.any() and model.layers[0].linear.weight.std().item() == pytest.approx(0.25, rel=0.1)
    standard = build_model(image_config(tmp_path, mup={"parametrization": "standard", "base_width": None}), 3)
    assert standard.readout.weight.any() and {role.m_in for role in standard.roles.values()} == {1}


def test_base_as_a_model_section_says_what_a_base_width_does(tmp_path: Path) -> None:
    one = build_model(image_config(tmp_path, model={"width": 32}), 3)
    base = {"kind": "mlp", "width": 8, "activation": "relu"}
    config = image_config(tmp_path, model={"width": 32}, mup={"base_width": None, "base": base})
    other = build_model(config, 3)
    assert one.roles == other.roles and one.base_shapes == other.base_shapes
    for changes, key in (({"bias": False}, "mup.base.bias"), ({"features": 5}, "mup.base.features")):
        with pytest.raises(ConfigError) as caught:
            build_model(image_config(tmp_path, mup={"base_width": None, "base": {**base, **changes}}), 3)
        assert caught.value.key == key


def test_features_and_classes_come_from_the_data(tmp_path: Path) -> None:
    meta = build_meta(image_config(tmp_path))
    assert (meta.spec.features, meta.spec.classes) == (16, 3) and meta.readout.weight.is_meta
    assert build_model(image_config(tmp_path)).state_dict().keys() == meta.state_dict().keys()


def test_seeded_start_copies_and_half_precision(tmp_path: Path) -> None:
    config = image_config(tmp_path)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, two = build_model(config, 3), build_model(config, 3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    torch.manual_seed(config.seed)
    two.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    model, (images, _) = awake(config), batch()
    expected = model(images)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(images), expected) and other.roles == model.roles
    half = copy.deepcopy(model).bfloat16()  # images stay float32, whatever the weights are
    assert half.hidden(images).dtype == torch.bfloat16
    assert torch.allclose(half(images).float(), expected, atol=0.1)


def test_dropout_drops_in_training_only(tmp_path: Path) -> None:
    model, (images, _) = awake(image_config(tmp_path, model={"dropout": 0.5})), batch()
    model.eval()
    assert torch.equal(model(images), model(images))
    model.train()
    assert not torch.equal(model(images), model(images))


def test_blocks_are_the_forward_pass(tmp_path: Path) -> None:
    model, (images, _) = awake(image_config(tmp_path, model={"depth": 3})), batch()
    h = images
    for block in model.blocks():
        h = block.module(h)
    assert torch.equal(h, model(images))
    assert [(block.name, block.kind, block.layers) for block in model.blocks()] == [
        ("layer0", "layer", 1), ("layer1", "layer", 1), ("layer2", "layer", 1), ("head", "head", 0),
    ]
    assert isinstance(model, MLP) and np.prod(model.readout.weight.shape) == 48
    for engine in ("invert", "checkpoint"):
        with pytest.raises(ConfigError, match="keeps its few activations"):
            model.set_engine(engine)
