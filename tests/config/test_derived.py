"""Numbers that follow from the configuration, against the formulas written out by hand."""

import pytest

from ipu_lean.config import ModelConfig, derived, make_config

pytestmark = pytest.mark.pod


def build(model=None, mup=None, **rest):
    return make_config(model=model or {}, mup={"base_width": 64, **(mup or {})}, **rest)


@pytest.mark.parametrize(
    "model, heads, size",
    [
        ({"width": 256}, 4, 64),
        ({"width": 32}, 1, 32),
        ({"width": 96, "heads": 6}, 6, 16),
        ({"width": 96, "head_size": 24}, 4, 24),
    ],
)
def test_heads_and_their_size(model, heads, size):
    section = ModelConfig(**model)
    assert (derived.heads(section), derived.head_size(section)) == (heads, size)


def test_ffn_width_scales_with_the_width_of_the_base():
    assert derived.ffn_width(ModelConfig(width=96, ffn_ratio=2.5)) == 240
    assert derived.ffn_width(ModelConfig(width=96, ffn_width=100)) == 100
    fixed = ModelConfig(width=1024, ffn_width=4096, heads=16)
    small = derived.at_width(fixed, 256)
    assert (small.width, derived.ffn_width(small), derived.heads(small), derived.head_size(small)) == (256, 1024, 16, 16)
    assert derived.ffn_width(derived.at_width(ModelConfig(width=128), 32)) == 128


def test_groups_follow_the_visits():
    """Six visits over four groups: floor(i * 4 / 6), worked out by hand."""
    model = ModelConfig(depth=12, num_inner_groups=2, num_hidden_groups=4)
    assert derived.visits(model) == 6
    assert [derived.group_of_visit(model, i) for i in range(6)] == [0, 0, 1, 2, 2, 3]
    plain = ModelConfig(depth=3)
    assert [derived.group_of_visit(plain, i) for i in range(3)] == [0, 1, 2]


def test_depth_multiplier_under_each_rule():
    assert derived.depth_mult(build({"depth": 8})) == 0.25
    assert derived.depth_mult(build({"depth": 8}, {"base_depth": 4})) == 0.5
    assert derived.depth_mult(build({"depth": 8}, {"depth_rule": "none"})) == 1.0
    assert derived.depth_mult(build({"depth": 8}, {"parametrization": "standard"})) == 1.0
    assert derived.depth_mult(build({"depth": 8}, {"parametrization": "standard", "depth_rule": "completep"})) == 0.25


def test_zero_inits_follow_the_parametrisation_unless_said():
    assert derived.readout_zero_init(build()) and derived.query_zero_init(build())
    standard = {"parametrization": "standard"}
    assert not derived.readout_zero_init(build(mup=standard)) and not derived.query_zero_init(build(mup=standard))
    assert derived.readout_zero_init(build(mup={**standard, "readout_zero_init": True}))
    assert not derived.query_zero_init(build(mup={"query_zero_init": False}))


def test_base_model_from_width_from_section_or_none():
    assert derived.base_model(build({"width": 256, "ffn_width": 512})).ffn_width == 128
    assert derived.base_model(make_config(mup={"base": {"width": 16, "depth": 1}})) == ModelConfig(width=16, depth=1)
    assert derived.base_model(build(mup={"parametrization": "standard"})) is None


def test_what_auto_means():
    assert derived.engine(build()) == "invert"
    assert derived.engine(build({"stack": {"kind": "residual"}})) == "store"
    assert derived.engine(build(memory={"engine": "checkpoint"})) == "checkpoint"
    assert derived.attention(build()) == "fused"
    assert derived.attention(build(device="ipu-emulated")) == "explicit"
    assert derived.attention(build({"attention": "explicit"})) == "explicit"
    assert derived.strategy(build()) == "single"
    assert derived.strategy(build(batch={"replicas": 2}, train={"processes": 2})) == "ddp"
    assert derived.horizon(build(train={"steps": 70})) == 70
    assert derived.horizon(build(train={"steps": 70}, schedule={"steps": 90})) == 90


def test_global_batch_and_vocabulary():
    assert build(batch={"micro": 2, "accumulation": 3, "replicas": 5}).batch.global_batch == 30
    assert derived.tokenizer_vocab(build().data.tokenizer) == 257
    assert derived.tokenizer_vocab(build(data={"tokenizer": {"kind": "bpe"}}).data.tokenizer) == 4096
    assert derived.tokenizer_vocab(build(data={"tokenizer": {"kind": "bpe", "vocab": 300}}).data.tokenizer) == 300
