"""The choices of `model.stack` in a whole model: engines, inverse, cache, roles."""

from __future__ import annotations

import pytest
import torch

from ipu_lean.errors import ConfigError
from ipu_lean.models import TrainStep, build_model
from tests.models.common import config_of, tiny, tokens_for

pytestmark = pytest.mark.pod
STACKS = {
    "momentum": {"stack": {"coupling": "momentum"}},
    "momentum aaff": {"stack": {"coupling": "momentum", "order": "aaff", "output": "y"}},
    "modified-momentum": {"stack": {"coupling": "modified-momentum", "output": "y"}},
    "mean": {"stack": {"coupling": "mean"}},
    "mean, global": {"stack": {"coupling": "mean", "index": "global", "output": "gate"}},
    "affine": {"stack": {"coupling": "affine"}},
    "split": {"stack": {"input": "split"}},
    "zeros, concat": {"stack": {"input": "zeros", "output": "concat"}, "tied": False},
    "gate": {"stack": {"output": "gate-channels"}},
    "exact": {"stack": {"exact": True}},
}


def gradients(variant, engine, **extra):
    model = tiny(memory={"engine": engine}, **{**STACKS[variant], **extra}).double()
    tokens, labels = tokens_for(model)
    mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    mask[:, ..., :2] = False
    torch.manual_seed(3)
    loss, _ = model.loss(model.hidden(tokens, mask), labels)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("variant", STACKS)
@pytest.mark.parametrize("engine", ["invert", "checkpoint"])
def test_engines_agree_with_masks_dropout_and_shared_layers(variant, engine):
    extra = {"depth": 4, "num_hidden_groups": 2, "dropout": 0.2}
    if "aaff" in variant:
        extra = {"depth": 4, "dropout": 0.2}
    loss, reference = gradients(variant, "store", **extra)
    found_loss, found = gradients(variant, engine, **extra)
    assert found_loss == pytest.approx(loss, rel=1e-12)
    for name, gradient in reference.items():
        assert gradient.norm() > 0, name
        assert (gradient - found[name]).norm() <= 1e-9 * gradient.norm() + 1e-14, name


@pytest.mark.parametrize("variant", STACKS)
def test_inverse_gives_the_embedding_back(variant):
    model = tiny(depth=4, **STACKS[variant]).double().eval()
    tokens, _ = tokens_for(model)
    with torch.no_grad():
        h = model.embed(tokens)
        a, b = model.streams(h)
        back = model.inverse(a, b)
    assert back.shape == h.shape and (a - h[..., : a.shape[-1]]).norm() > 0.1 * a.norm()
    off = 2.0**-15 * (h.numel() ** 0.5) / h.norm() if variant == "exact" else 0.0
    assert (back - h).norm() <= (1e-11 + off) * h.norm()


def test_a_residual_stack_has_no_inverse():
    model = tiny(stack={"kind": "residual"})
    with pytest.raises(ConfigError, match="only a reversible stack"):
        model.streams(model.embed(tokens_for(model)[0]))


@pytest.mark.parametrize("variant", ["momentum", "mean", "affine", "split", "exact"])
def test_cached_logits_equal_whole_ones(variant):
    model = tiny(depth=4, **STACKS[variant]).double().eval()
    tokens, _ = tokens_for(model)
    cache = model.new_cache(2)
    with torch.no_grad():
        parts = [model.logits(tokens[:, i : i + 4], cache) for i in (0, 4, 8)]
        assert torch.allclose(torch.cat(parts, 1), model.logits(tokens), rtol=1e-12, atol=1e-12)


def test_roles_follow_the_width_of_the_streams():
    """Concatenated: the readout reads twice the width, over twice the base. Split: half of it inside. The gate is no branch."""
    mup = {"base_width": 8, "base_depth": 1}
    concat = build_model(config_of(mup, stack={"output": "concat"}, tied=False))
    assert concat.readout.in_features == 32 and concat.readout.width_mult == 2.0
    assert concat.roles["readout.weight"].kind == "readout" and concat.roles["readout.weight"].m_in == 2.0
    assert concat.norm.weight.shape == (32,) and concat.roles["norm.weight"].m_in == 2.0
    split = build_model(config_of(mup, stack={"input": "split"}))
    role = split.roles["layers.blocks.0.branches.0.attention.query.linear.weight"]
    assert (role.kind, role.m_in, role.m_out, role.depth_mult) == ("hidden", 2.0, 2.0, 0.5)
    assert split.embedding.token.weight.shape == (23, 16) and split.norm.weight.shape == (16,)
    assert split.layers.blocks[0].branches[0].norm.weight.shape == (8,)
    for output, features in (("gate", 1), ("gate-channels", 16)):
        gated = build_model(config_of(mup, stack={"output": output}))
        role = gated.roles["layers.gate.weight"]
        assert gated.layers.gate.weight.shape == (features,)
        assert (role.kind, role.depth_mult, role.init_std) == ("vector", 1.0, 0.0)
        assert role.m_in == (2.0 if features > 1 else 1.0)
    affine = build_model(config_of(mup, stack={"coupling": "affine"}))
    role = affine.roles["layers.blocks.1.branches.1.scale.linear.weight"]
    assert (role.kind, role.m_in, role.depth_mult, role.init_std) == ("hidden", 2.0, 0.5, 0.0)


def test_the_branch_multiplier_passes_through_every_coupling():
    """CompleteP halves what a branch adds when the base depth is half of the depth, so the stack's result moves half as far."""
    for variant in ("momentum", "mean", "split"):
        moved = []
        for base_depth in (2, 1):
            model = tiny(mup={"base_width": 16, "base_depth": base_depth, "depth_rule": "completep"}, **STACKS[variant])
            with torch.no_grad():
                for name, parameter in model.named_parameters():  # branches that do not depend on what they read
                    if "branches" in name and not name.endswith(("out.linear.bias", "down.linear.bias")):
                        parameter.zero_()
            h = torch.zeros(1, 2, 16)
            moved.append(model.stack(h).detach())
        assert moved[0].norm() > 0 and torch.allclose(moved[1], 0.5 * moved[0], rtol=1e-5), variant


def test_training_leaves_the_gate_free_to_move():
    model = tiny(stack={"output": "gate-channels"}, memory={"engine": "invert"})
    tokens, labels = tokens_for(model)
    TrainStep(model)(tokens, labels)[0].backward()
    assert (model.layers.gate.weight.grad != 0).all()
