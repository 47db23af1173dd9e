"""From configuration to model: initialisation, random state, muP's base shapes and roles, and what is refused."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from ipu_lean.config import make_config
from ipu_lean.errors import ConfigError
from ipu_lean.models import base_shapes_for, build_meta, build_model, spec_of
from tests.models.common import TINY, config_of, tiny, tokens_for

pod = pytest.mark.pod
NO_ZEROS = {"readout_zero_init": False, "query_zero_init": False}
WIDE = {"width": 64, "heads": 4, "vocab": 600}


@pod
def test_building_leaves_every_generator_alone_and_follows_the_seed():
    torch.manual_seed(5)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    models = [build_model(config_of({"base_width": 8}, seed=seed)) for seed in (0, 0, 1)]
    build_meta(config_of({"base_width": 8}))
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["embedding.token.weight"], states[2]["embedding.token.weight"])


@pod
@pytest.mark.parametrize("tied", [True, False])
def test_stds_at_two_widths(tied):
    for width in (64, 256):
        config = config_of({"base_width": 32, "init_scale": 0.5, **NO_ZEROS}, width=width, heads=4, vocab=600, tied=tied)
        model = build_model(config)
        for name, parameter in model.named_parameters():
            role, measured = model.roles[name], parameter.std().item()
            if role.kind == "hidden":
                assert role.init_std == pytest.approx(0.5 / parameter.shape[1] ** 0.5)
            if role.kind == "embedding":
                assert role.init_std == 0.1
            if role.kind == "readout":
                assert role.init_std == pytest.approx(0.5 / 32**0.5)
            assert measured == pytest.approx(role.init_std, rel=0.05), name  # 0 for gains and biases
        assert (model.roles["embedding.token.weight"].tied, len(model.roles)) == (tied, len(list(model.parameters())))


@pod
def test_zero_starts():
    model = build_model(config_of({"base_width": 8}, tied=False))
    zero = {name for name, parameter in model.named_parameters() if parameter.dim() == 2 and not parameter.any()}
    assert zero == {"readout.weight"} | {f"layers.blocks.{i}.branches.0.attention.query.linear.weight" for i in (0, 1)}
    assert all(model.roles[name].init_std == 0 for name in zero)
    standard = build_model(config_of(tied=False))
    assert all(parameter.any() for parameter in standard.parameters() if parameter.dim() == 2)


@pod
def test_mup_at_its_base_is_the_standard_parametrisation():
    standard = build_model(config_of(tied=False))
    other = build_model(config_of({"base_width": 16, "depth_rule": "none", **NO_ZEROS}, tied=False))
    tokens, _ = tokens_for(standard)
    assert all(torch.equal(a, b) for a, b in zip(standard.parameters(), other.parameters()))
    assert torch.equal(standard(tokens), other(tokens))
    with_zeros = build_model(config_of({"base_width": 16, "depth_rule": "none"}, tied=False))
    for (name, a), b in zip(standard.named_parameters(), with_zeros.parameters()):
        assert torch.equal(a, b) or "query" in name or "readout" in name


@pod
def test_attention_scale():
    def scale(width, mup=None, **heads):
        sizes = {"heads": None, **heads}
        return spec_of(config_of(mup, width=width, **sizes)).attention_scale

    mup = {"base_width": 32}
    assert scale(64, heads=4) == pytest.approx(16**-0.5)
    assert scale(32, mup, heads=4) == pytest.approx(8**-0.5)  # at the base both agree
    assert scale(128, mup, heads=4) == pytest.approx(8**0.5 / 32)  # heads of 32, base heads of 8: 1/d beyond the base
    assert scale(128, mup, head_size=16) == pytest.approx(16**-0.5)  # fixed size: unchanged
    assert scale(128, {**mup, "attention_mult": 3.0}, head_size=16) == pytest.approx(3 * 16**-0.5)


@pod
def test_roles_of_every_kind():
    model = build_model(config_of({"base_width": 8, "output_mult": 3.0}, width=32, depth=4, tied=False, positions="learned"))
    found = {name.replace("layers.blocks.0.branches.", ""): role for name, role in model.roles.items()}
    assert (found["embedding.token.weight"].kind, found["embedding.position.weight"].kind) == ("embedding", "embedding")
    readout = found["readout.weight"]
    assert (readout.kind, readout.m_in, readout.m_out, readout.forward_mult) == ("readout", 4.0, 1.0, 0.75)
    down = found["1.feed_forward.down.linear.weight"]
    assert (down.kind, down.m_in, down.m_out, down.depth_mult) == ("hidden", 4.0, 4.0, 0.5)
    assert (found["0.norm.weight"].kind, found["0.norm.weight"].depth_mult) == ("vector", 0.5)
    assert found["norm.weight"].depth_mult == found["embedding.token.weight"].depth_mult == 1.0
    assert model.base_shapes["readout.weight"] == (None, 8)
    assert model.base_shapes["layers.blocks.0.branches.1.feed_forward.up.linear.weight"] == (32, 8)
    tied = build_model(config_of({"base_width": 8, "output_mult": 3.0}, width=32))
    assert tied.roles["embedding.token.weight"].forward_mult == 0.75


@pod
def test_branches_carry_the_depth_multiplier():
    reference, scaled = tiny({"base_width": 16, "depth_rule": "none"}), tiny({"base_width": 16, "base_depth": 1})
    assert scaled.spec.branch_mult == 0.5 and reference.spec.branch_mult == 1.0
    h = torch.randn(1, 5, 16)
    for a, b in zip(reference.layers.executed()[0].branches, scaled.layers.executed()[0].branches):
        assert torch.equal(0.5 * a(h), b(h))


@pod
def test_standard_has_no_multipliers():
    model = build_model(config_of(ffn_width=40))
    assert all((role.m_in, role.m_out, role.depth_mult, role.forward_mult) == (1, 1, 1, 1) for role in model.roles.values())
    assert {size for shape in model.base_shapes.values() for size in shape} == {None}


@pod
def test_meta_model_has_the_same_roles_and_no_memory():
    config = config_of({"base_width": 8})
    real, meta = build_model(config), build_meta(config)
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert real.roles == meta.roles and real.base_shapes == meta.base_shapes
    assert {n: p.shape for n, p in real.named_parameters()} == {n: p.shape for n, p in meta.named_parameters()}


@pod
def test_base_given_as_a_model():
    base = {**TINY, "width": 8, "ffn_ratio": 2.0, "depth": 7, "heads": 1, "vocab": None}
    config = config_of({"base": base}, width=32, heads=None, head_size=8)
    model = build_model(config)
    name = "layers.blocks.1.branches.1.feed_forward.down.linear.weight"
    assert model.base_shapes[name] == (8, 16)  # the base's own ratio of 2
    assert (model.roles[name].m_in, model.roles[name].m_out) == (8.0, 4.0)
    assert model.spec.base_width == 8 and model.spec.attention_scale == pytest.approx(8**-0.5)
    same_width = build_model(config_of({"base": {**TINY, "ffn_width": 32}}))
    assert same_width.roles[name].m_in == 2.0 and same_width.roles[name].m_out == 1.0
    assert same_width.base_shapes["embedding.token.weight"] == (None, 16)  # grows, though the target's width is the base's


@pod
def test_target_smaller_than_its_base():
    model = build_model(config_of({"base_width": 64}))
    assert model.roles["layers.blocks.0.branches.0.attention.key.linear.weight"].m_in == 0.25
    assert model.readout.width_mult == 0.25


@pod
def test_vocabulary_from_the_argument_the_section_or_the_tokenizer():
    def config(**model):
        return make_config(model={**TINY, "vocab": None, **model}, mup={"parametrization": "standard"})

    assert build_model(config()).spec.vocab == 257
    assert build_model(config(), 300).spec.vocab == 300
    assert build_model(config(vocab=320), 300).spec.vocab == 320
    assert base_shapes_for(config(), 300)["embedding.token.weight"] == (None, None)


def test_stock_mup_optimizer_takes_our_model():
    mup = pytest.importorskip("mup", reason="the reference is the mup package")
    model = build_model(config_of({"base_width": 4}, tied=False))
    groups = mup.MuAdam(model.parameters(), lr=0.1).param_groups
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        expected = 0.1 / 4 if model.roles[name].kind == "hidden" else 0.1
        assert rates[id(parameter)] == pytest.approx(expected), name


def refused(mup=None, **model):
    return lambda: build_model(config_of(mup, **model))


BASE = {**TINY, "width": 8}
WRONG = {
    "a number for the FFN under mup": (refused({"base_width": 8}, ffn_width=64), "model.ffn_width"),
    "vocabulary below the tokenizer's": (lambda: build_model(config_of(), 24), "model.vocab"),
    "base with other positions": (refused({"base": {**BASE, "positions": "none"}}), "mup.base.positions"),
    "base with another norm": (refused({"base": {**BASE, "norm": "rmsnorm"}}), "mup.base.norm"),
    "base untied": (refused({"base": {**BASE, "tied": False}}), "mup.base.tied"),
    "base without biases": (refused({"base": {**BASE, "bias": False}}), "mup.base.bias"),
    "base with a sandwich": (refused({"base": {**BASE, "sandwich": True}}), "mup.base.sandwich"),
    "base with another stack": (refused({"base": {**BASE, "stack": {"kind": "residual"}}}), "mup.base.stack"),
    "base with another vocabulary": (refused({"base": {**BASE, "vocab": 24}}), "mup.base.vocab"),
    "base gated": (refused({"base": {**BASE, "activation": "swiglu"}}), "mup.base.activation"),
    "base with another context": (
        refused({"base": {**BASE, "seq": 24, "positions": "learned"}}, positions="learned"),
        "mup.base.seq",
    ),
    "a tied readout at zero": (refused({"base_width": 8, "readout_zero_init": True}), "mup.readout_zero_init"),
    "no base": (refused({"parametrization": "mup"}), "mup.base_width"),
    "base that heads do not divide": (refused({"base_width": 9}), "mup.base_width"),
    "heads that do not divide": (refused(heads=3), "model.heads"),
    "odd heads under rotary": (refused(heads=16), "model.heads"),
    "aaff of odd depth": (refused(depth=3, stack={"order": "aaff"}), "model.depth"),
    "aaff with groups of one": (refused(depth=4, num_hidden_groups=2, stack={"order": "aaff"}), "model.num_inner_groups"),
    "a residual stack inverted": (refused(stack={"kind": "residual"}, memory={"engine": "invert"}), "memory.engine"),
}


@pod
@pytest.mark.parametrize("name", sorted(WRONG))
def test_mistakes_name_their_key(name):
    build, key = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.key == key
    assert "\n" not in str(caught.value) and len(str(caught.value)) > 20
