"""The parametrisation of a Reformer: roles, base shapes, and sizes that do not grow with width or depth."""

from __future__ import annotations

import pytest
import torch

from ipu_lean.config import ModelConfig, make_config
from ipu_lean.errors import ConfigError
from ipu_lean.models import build_meta, build_model
from ipu_lean.optim import explain_model
from tests.models.common import tokens_for
from tests.models.reformer_common import LAYERS, gradients

pytestmark = pytest.mark.pod


def wide(width=64, **model):
    sizes = {"width": width, "heads": 4, "depth": 2, "vocab": 50, "seq": 32, **LAYERS, **model}
    return make_config(model=sizes, mup={"base_width": 16}, data={"tokenizer": {"kind": "bpe", "path": "t"}})


def test_roles_of_a_reformer():
    model = build_model(wide())
    roles = model.roles
    for table in ("embedding.token.weight", "embedding.position.rows", "embedding.position.columns"):
        assert roles[table].kind == "embedding" and roles[table].init_std == 0.1
    shared = "layers.blocks.1.branches.0.attention.query_key.linear.weight"
    assert roles[shared].kind == "hidden" and (roles[shared].m_in, roles[shared].m_out) == (4.0, 4.0)
    assert roles[shared].init_std == 64**-0.5 and dict(model.named_parameters())[shared].abs().max() > 0
    query = "layers.blocks.0.branches.0.attention.query.linear.weight"
    assert roles[query].init_std == 0.0 and not dict(model.named_parameters())[query].any()
    assert roles["readout.weight"].kind == "readout" and roles["readout.weight"].m_in == 4.0
    assert roles["readout.bias"].kind == "vector"
    rows = {row["name"]: row for row in explain_model(model, wide())}
    assert rows[shared]["lr"] == pytest.approx(rows["embedding.position.rows"]["lr"] / 4) and rows[shared]["init_std"] > 0


def test_scores_of_aligned_vectors_do_not_grow_with_the_head():
    """|q| grows as sqrt(head size) with vectors that align; the keys have unit length."""
    assert build_meta(wide(64)).spec.lsh.score_mult == pytest.approx((4 / 16) ** 0.5)
    assert build_meta(wide(16)).spec.lsh.score_mult == 1.0
    assert build_meta(wide(64, heads=None, head_size=4)).spec.lsh.score_mult == 1.0


def test_axial_vectors_given_as_numbers_grow_with_the_width():
    model = build_meta(wide(axial={"dims": [32, 32]}))
    assert model.base_shapes["embedding.position.rows"] == (None, None, 8)
    assert model.roles["embedding.position.rows"].m_in == 1.0


def test_a_base_given_as_a_whole():
    base = {**LAYERS, "width": 16, "heads": 2, "head_size": 4, "seq": 32}
    config = make_config(
        model={**LAYERS, "width": 32, "heads": 2, "head_size": 8, "vocab": 50},
        mup={"base": base},
        data={"tokenizer": {"kind": "bpe", "path": "t"}},
    )
    model = build_model(config)
    hashed = "layers.blocks.1.branches.0.attention"
    assert model.base_shapes[f"{hashed}.query_key.linear.weight"] == (8, 16)
    assert model.roles[f"{hashed}.out.linear.weight"].m_in == 2.0
    changes = {"attention": {"attention": "local", "lsh": {}}, "axial.shape": {"seq": 64}}
    for key, change in [*changes.items(), ("readout_bias", {"readout_bias": False})]:
        other = config.model_copy(
            update={"mup": config.mup.model_copy(update={"base": ModelConfig.model_validate({**base, **change})})}
        )
        with pytest.raises(ConfigError) as raised:
            build_model(other)
        assert raised.value.key == f"mup.base.{key}"


def test_streams_and_gradients_do_not_grow_with_depth():
    """Reversible stacks elsewhere explode with depth; CompleteP's multipliers keep both sizes."""
    sizes = []
    for depth in (4, 32):
        torch.manual_seed(0)
        config = wide(16, depth=depth)
        model = build_model(config.model_copy(update={"mup": config.mup.model_copy(update={"query_zero_init": False})}))
        with torch.no_grad():
            model.readout.weight.normal_(0.0, 0.25)
        tokens, labels = tokens_for(model)
        h = model.embed(tokens)
        streams = torch.cat(model.streams(h), -1)
        _, found = gradients(model, tokens, labels)
        sizes.append((float(streams.detach().square().mean().sqrt()), float(found["embedding.token.weight"].norm())))
    assert all(deep < 2.0 * flat for flat, deep in zip(*sizes)), sizes
