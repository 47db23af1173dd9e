"""Roles from shapes and module types, and what must not be able to lose them."""
from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn

from ipu_lean import _compat
from ipu_lean.errors import ConfigError
from ipu_lean.mup import Role, base_shapes_from_width, compute_roles, role_of_infshape, roles_from_json, roles_to_json, shapes_of
from ipu_lean.mup.infshape import make_infshape
from tests.mup.toy import Toy

pytestmark = pytest.mark.pod


@pytest.fixture(scope="module")
def base():
    return base_shapes_from_width(Toy, 16)


def roles_at(base, width, **options):
    return compute_roles(Toy(width), base, **options)


def test_kinds_and_multipliers(base):
    inside = {name for name in base if name.startswith("blocks.")}
    roles = roles_at(base, 64, depth_scaled=inside, depth_mult=0.5)
    want = {
        "embedding.weight": ("embedding", 1, 4, 1.0),
        "position": ("embedding", 1, 4, 1.0),
        "features.weight": ("input", 1, 4, 1.0),
        "features.bias": ("vector", 4, 4, 1.0),
        "blocks.0.norm.weight": ("vector", 4, 4, 0.5),
        "blocks.1.up.weight": ("hidden", 4, 4, 0.5),
        "blocks.1.down.weight": ("hidden", 4, 4, 0.5),
        "head.weight": ("readout", 4, 1, 1.0),
        "head.bias": ("vector", 1, 1, 1.0),
    }
    for name, (kind, m_in, m_out, depth) in want.items():
        role = roles[name]
        assert (role.kind, role.m_in, role.m_out, role.depth_mult, role.tied) == (kind, m_in, m_out, depth, False), name
    assert list(roles) == list(shapes_of(Toy(64)))
    assert roles["head.weight"].forward_mult == 0.25 and roles["head.bias"].forward_mult == 1.0


def test_widths_that_scale_differently():
    base = base_shapes_from_width(Toy, 16)
    roles = compute_roles(Toy(64, ffn=96), base)  # the base's FFN is 32
    assert (roles["blocks.0.up.weight"].m_in, roles["blocks.0.up.weight"].m_out) == (4, 3)
    assert (roles["blocks.0.down.weight"].m_in, roles["blocks.0.up.bias"].m_in) == (3, 3)


def test_base_larger_than_target(base):
    assert roles_at(base, 8)["blocks.0.up.weight"].m_in == 0.5


def test_initial_std_is_what_a_module_states(base):
    roles = roles_at(base, 64)
    assert roles["blocks.0.up.weight"].init_std == pytest.approx(192**-0.5)  # stated by the block around the layer
    assert roles["head.weight"].init_std == 0.0
    assert math.isnan(roles["norm.weight"].init_std)


def test_a_layers_own_multiplier(base):
    model = Toy(64)
    model.embedding.output_mult, model.head.output_mult = 3.0, 5.0
    roles = compute_roles(model, base)
    assert roles["embedding.weight"].forward_mult == 3.0 and roles["head.weight"].forward_mult == 5.0 / 4
    assert roles["blocks.0.up.weight"].forward_mult == 1.0


def test_only_shapes_are_read(base):
    with torch.device("meta"):
        model = Toy(64)
    assert roles_to_json(compute_roles(model, base)) == roles_to_json(roles_at(base, 64))


class Tied(nn.Module):
    def __init__(self, width: int, readout: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embedding.weight
        if readout:
            self.head.width_mult, self.head.output_mult = width / 16, 3.0


class TiedWithoutParameter(nn.Module):
    """Reads the embedding's matrix without registering it."""

    class Head(nn.Module):
        def __init__(self, table: nn.Embedding, width: int) -> None:
            super().__init__()
            self.source, self.width_mult, self.output_mult = (table,), width / 16, 3.0

        def tensors(self):
            return [self.source[0].weight]

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.mix = nn.Linear(width, width)
        self.head = self.Head(self.embedding, width)


@pytest.mark.parametrize("build", [lambda width: Tied(width, True), TiedWithoutParameter])
def test_tied_is_an_embedding_with_the_readouts_multiplier(build):
    roles = compute_roles(build(64), base_shapes_from_width(build, 16))
    role = roles["embedding.weight"]
    assert "head.weight" not in roles
    assert (role.kind, role.m_in, role.m_out, role.tied, role.forward_mult) == ("embedding", 1.0, 4.0, True, 0.75)


def test_tied_plain_linear_is_refused():
    base = base_shapes_from_width(lambda width: Tied(width, False), 16)
    with pytest.raises(ConfigError, match="embedding.weight.*plain Linear"):
        compute_roles(Tied(64, False), base)


def test_hard_coded_inner_size_is_refused_with_a_guess():
    base = base_shapes_from_width(lambda width: Toy(width, ffn=32), 16)
    with pytest.raises(ConfigError, match="`blocks.0.up.weight`") as caught:
        compute_roles(Toy(64, ffn=32), base)
    assert "(None, 16)" in str(caught.value) and "(32, 64)" in str(caught.value) and "hard-coded" in str(caught.value)


def test_convolution_to_fixed_channels_is_refused():
    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, width, 3), nn.Conv2d(width, width, 3), nn.ConvTranspose2d(width, 3, 3))

    with pytest.raises(ConfigError, match="`2.weight`.*plain ConvTranspose2d"):
        compute_roles(build(64), base_shapes_from_width(build, 16))
    two = compute_roles(build(64)[:2], base_shapes_from_width(lambda width: build(width)[:2], 16))
    assert (two["0.weight"].kind, two["0.weight"].m_out, two["1.weight"].kind, two["1.weight"].m_in) == ("input", 4, "hidden", 4)


def test_stack_of_matrices_and_bilinear():
    class Experts(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(5, 2 * width, width))

    role = compute_roles(Experts(64), {"up": (None, 16, 16)})["up"]
    assert (role.kind, role.m_in, role.m_out) == ("hidden", 4.0, 8.0)
    with pytest.raises(ConfigError, match="more than two dimensions"):
        compute_roles(nn.Bilinear(8, 8, 8), base_shapes_from_width(lambda width: nn.Bilinear(width, width, width), 4))


def test_readout_with_another_base_is_refused(base):
    with pytest.raises(ConfigError, match="divides by 2, but the base shapes say 4"):
        compute_roles(Toy(64, base_width=32), base)


def test_another_architecture_is_refused(base):
    with pytest.raises(ConfigError, match="blocks.2"):
        compute_roles(Toy(64, depth=3), base)


def test_json(base):
    roles = roles_at(base, 64, depth_scaled={"norm.weight"}, depth_mult=0.25)
    text = roles_to_json(roles)
    assert json.loads(text)["norm.weight"]["init_std"] is None
    again = roles_from_json(text)
    assert roles_to_json(again) == text and again["head.weight"] == roles["head.weight"]
    for bad in ("[]", "{", '{"a": {"kind": "hidden"}}', '{"a": {"kind": "other", "m_in": 1, "m_out": 1}}', '{"a": 3}'):
        with pytest.raises(ConfigError, match="roles"):
            roles_from_json(bad)
    with pytest.raises(ConfigError, match="colour"):
        roles_from_json('{"a": {"kind": "hidden", "m_in": 1, "m_out": 1, "colour": 1}}')


def test_role_of_an_infshape():
    assert role_of_infshape(make_infshape((16, 16), (32, 64))) == Role("hidden", 4.0, 2.0, init_std=math.nan)
    assert role_of_infshape(make_infshape((None, 16), (10, 64))).m_out == 4.0
    assert role_of_infshape(make_infshape((None,), (10,))).m_in == 1.0


def copied(model):
    return copy.deepcopy(model)


def assigned(model):
    _compat.load_state_assign(model, {name: tensor.clone() for name, tensor in model.state_dict().items()})
    return model


def replaced(model):
    """What PopTorch does while it traces: parameters are new objects after a move."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.to(torch.float64)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def emptied(model):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = model.to("meta").to_empty(device="cpu")
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("operation", [copied, assigned, replaced, emptied])
def test_roles_outlive_the_parameters(base, operation):
    """infshape goes with the old parameters (that is why roles are kept by name); names, roles and forward stay."""
    model = Toy(64)
    nn.init.normal_(model.head.weight)
    model.roles = compute_roles(model, base)
    for parameter in model.parameters():
        parameter.infshape = object()
    tokens = torch.arange(10)
    before, text = model(tokens), roles_to_json(model.roles)
    after = operation(model)
    assert not any(hasattr(parameter, "infshape") for parameter in after.parameters())
    assert roles_to_json(after.roles) == text == roles_to_json(compute_roles(after, base))
    assert torch.allclose(after(tokens).float(), before, rtol=0, atol=1e-5 if operation is replaced else 0)


def test_forward_without_the_modules_own_parameters(base):
    """functional_call and vmap hand in other tensors; the readout's multiplier does not come from them."""
    from torch.func import functional_call, stack_module_state, vmap

    models = [Toy(64), Toy(64)]
    for model in models:
        nn.init.normal_(model.head.weight)
    tokens = torch.arange(10)
    detached = {name: parameter.detach().clone() for name, parameter in models[0].named_parameters()}
    assert torch.equal(functional_call(models[0], detached, (tokens,)), models[0](tokens))
    parameters, buffers = stack_module_state(models)
    both = vmap(lambda p, b: functional_call(models[0], (p, b), (tokens,)))(parameters, buffers)
    assert torch.allclose(both[1], models[1](tokens), atol=1e-5)
