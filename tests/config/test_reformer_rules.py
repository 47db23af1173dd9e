"""The keys of a Reformer: which kinds of attention the layers get, which lengths are legal, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ipu_lean.config import ModelConfig, derived, layer_kinds, load_config, make_config
from ipu_lean.errors import ConfigError

pytestmark = pytest.mark.pod


def model(**changes: Any) -> ModelConfig:
    return make_config(model={"tied": False, **changes}, mup={"parametrization": "standard"}).model


@pytest.mark.parametrize(
    "changes, kinds",
    [
        ({"depth": 2}, ("full", "full")),
        ({"depth": 2, "attention": "explicit"}, ("full", "full")),
        ({"depth": 2, "attention": "lsh"}, ("lsh", "lsh")),
        ({"depth": 4, "attention": ["local", "lsh"]}, ("local", "lsh", "local", "lsh")),
        ({"depth": 3, "attention": ["local", "full", "lsh"]}, ("local", "full", "lsh")),
        # Two groups of two layers, three visits: 0, 0, 1.
        (
            {"depth": 6, "num_hidden_groups": 2, "num_inner_groups": 2, "attention": ["local", "lsh", "full", "full"]},
            ("local", "lsh", "local", "lsh", "full", "full"),
        ),
        ({"depth": 6, "num_hidden_groups": 1, "num_inner_groups": 2, "attention": ["lsh", "full"]}, ("lsh", "full") * 3),
    ],
)
def test_a_list_of_kinds_is_repeated_over_the_layers(changes: Any, kinds: Any) -> None:
    assert layer_kinds.kinds(model(**changes)) == kinds


def test_the_implementation_follows_the_device_whatever_the_kind() -> None:
    def found(attention: Any, **rest: Any) -> str:
        return derived.attention(make_config(model={"attention": attention}, mup={"base_width": 64}, **rest))

    assert found(["lsh", "local"]) == found("full") == found("auto") == "fused"
    assert found("explicit") == found("lsh", device="ipu-emulated") == "explicit"


@pytest.mark.parametrize(
    "changes, length, padded",
    [
        ({"attention": "full"}, 77, 77),
        ({"attention": "local", "local": {"chunk": 16}}, 16, 16),
        ({"attention": "local", "local": {"chunk": 16}}, 5, 5),
        ({"attention": "local", "local": {"chunk": 16}}, 17, 32),
        ({"attention": "lsh", "lsh": {"chunk": 16, "full_below": 40}}, 39, 39),
        ({"attention": "lsh", "lsh": {"chunk": 16, "full_below": 40}}, 41, 48),
        # Chunks of 4 and 6: eight is legal for one of them only.
        ({"attention": ["local", "lsh"], "local": {"chunk": 4}, "lsh": {"chunk": 6}}, 8, 12),
        ({"attention": ["local", "lsh"], "local": {"chunk": 4}, "lsh": {"chunk": 6}}, 4, 4),
        ({"attention": ["local", "lsh"], "local": {"chunk": 4}, "lsh": {"chunk": 6}}, 25, 36),
    ],
)
def test_sequences_are_padded_to_what_every_layer_takes(changes: Any, length: int, padded: int) -> None:
    assert layer_kinds.padded_length(model(**changes), length) == padded


@pytest.mark.parametrize(
    "length, chunk, longest, factors",
    [
        (128, 64, 4096, (4,)),
        (320, 64, 4096, (8,)),  # 2 * 5 = 10, and the power of two below
        (4096, 64, 4096, (128,)),  # the limit itself
        (16384, 64, 16384, (16, 32)),  # 512 is beyond 2 * max(16, 64)
        (524288, 64, 524288, (128, 128)),
        (524288, 128, 524288, (64, 128)),
        (8, 8, 64, (2,)),
    ],
)
def test_buckets_follow_the_length(length: int, chunk: int, longest: int, factors: Any) -> None:
    assert layer_kinds.automatic_buckets(length, chunk, longest) == factors
    section = model(attention="lsh", seq=longest, lsh={"chunk": chunk})
    assert layer_kinds.bucket_factors(section, length) == factors
    assert layer_kinds.bucket_factors(model(attention="lsh", lsh={"buckets": [4, 6]}), length) == (4, 6)
    assert layer_kinds.bucket_factors(model(attention="lsh", lsh={"buckets": 12}), length) == (12,)


def test_rotations_are_drawn_every_so_many_updates_and_found_again_by_a_checkpoint() -> None:
    """What stands after u updates is what the last of them was made with."""
    for every in (1, 3, 0):
        section = model(attention="lsh", lsh={"redraw_every": every})
        standing = 0
        assert layer_kinds.standing_draw(section, 0) == 0
        for update in range(10):
            due = layer_kinds.draw_before(section, update)
            assert (due is not None) == (every > 0 and update % every == 0)
            standing = standing if due is None else due
            assert layer_kinds.standing_draw(section, update + 1) == standing
    assert layer_kinds.draw_before(model(), 0) is None and layer_kinds.standing_draw(model(), 5) is None


@pytest.mark.parametrize(
    "seq, shape", [(4096, (64, 64)), (6000, (75, 80)), (2**19, (512, 1024)), (48, (6, 8)), (13, (4, 4)), (1, (1, 1)), (2, (1, 2))]
)
def test_the_grid_of_positions_is_nearly_square_and_holds_the_sequence(seq: int, shape: Any) -> None:
    assert layer_kinds.axial_shape(model(positions="axial", seq=seq)) == shape
    assert shape[0] * shape[1] >= seq


def test_a_grid_may_be_larger_than_the_sequence() -> None:
    assert layer_kinds.axial_shape(model(positions="axial", seq=48, axial={"shape": [8, 8]})) == (8, 8)


def test_axial_vectors_share_the_width_and_scale_with_it() -> None:
    assert layer_kinds.axial_dims(model(positions="axial", width=256)) == (64, 192)
    wide = model(positions="axial", width=256, axial={"dims": [128, 128]})
    assert layer_kinds.axial_dims(derived.at_width(wide, 64)) == (32, 32)


def test_heads_times_their_size_may_differ_from_the_width() -> None:
    narrow = model(width=32, heads=2, head_size=64)
    assert (derived.heads(narrow), derived.head_size(narrow), derived.attention_width(narrow)) == (2, 64, 128)
    pair = {"base": {"width": 64, "heads": 4, "head_size": 8}}
    config = make_config(model={"width": 128, "heads": 8, "head_size": 8}, mup=pair)
    assert derived.attention_width(config.model) == 64


def test_the_attention_may_do_without_biases() -> None:
    assert derived.attention_bias(model()) and not derived.attention_bias(model(bias=False))
    assert not derived.attention_bias(model(attention_bias=False))
    assert derived.attention_bias(model(bias=False, attention_bias=True))


@pytest.mark.parametrize(
    "changes, key, words",
    [
        ({"attention": "lhs"}, "model.attention", "did you mean `lsh`"),
        ({"attention": []}, "model.attention", "at least one"),
        ({"attention": ["local", "explicit"]}, "model.attention", "one of full, local, lsh"),
        ({"attention": 3}, "model.attention", "one of"),
        ({"attention": ["local", "lsh"], "depth": 3}, "model.attention", "divides model.depth"),
        (
            {"attention": ["local", "lsh"], "depth": 6, "num_hidden_groups": 3},
            "model.attention",
            "weights of their own",
        ),
        ({"lsh": {"hashes": 2}}, "model.lsh.hashes", "nobody reads this"),
        ({"attention": "lsh", "local": {"chunk": 32}}, "model.local.chunk", "nobody reads this"),
        ({"axial": {"shape": [16, 16]}}, "model.axial.shape", "positions are rotary"),
        ({"attention": "lsh", "lsh": {"buckets": 7}}, "model.lsh.buckets", "even"),
        ({"attention": "lsh", "lsh": {"buckets": [4, 3]}}, "model.lsh.buckets", "even"),
        ({"attention": "lsh", "lsh": {"buckets": [4, 4, 4]}}, "model.lsh.buckets", "two factors"),
        ({"attention": "lsh", "lsh": {"redraw_every": -1}}, "model.lsh.redraw_every", "at least 0"),
        ({"attention": "lsh", "lsh": {"full_below": 32}}, "model.lsh.full_below", "one chunk"),
        ({"positions": "axial", "axial": {"shape": [8, 8]}, "seq": 65}, "model.axial.shape", "64 positions"),
        ({"positions": "axial", "axial": {"shape": [0, 8]}}, "model.axial.shape", "two positive"),
        ({"positions": "axial", "axial": {"shape": [8]}}, "model.axial.shape", "two positive"),
        ({"positions": "axial", "axial": {"dims": [64, 64]}}, "model.axial.dims", "add up to model.width"),
        ({"readout_bias": True, "tied": True}, "model.readout_bias", "tied"),
        ({"causal": False}, "model.causal", "would see it"),
        ({"heads": 2, "head_size": 7}, "model.head_size", "in pairs"),
    ],
)
def test_what_does_not_fit_is_refused(changes: Any, key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        model(**changes)
    assert raised.value.key == key


@pytest.mark.parametrize(
    "mup, key",
    [
        ({"base_width": 64}, "model.head_size"),
        ({"base": {"width": 64, "heads": 8, "head_size": 8}}, "mup.base.heads"),
    ],
)
def test_mup_asks_how_a_fixed_inner_width_grows(mup: Any, key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_config(model={"width": 128, "heads": 8, "head_size": 8}, mup=mup)
    assert raised.value.key == key


def test_groups_of_heads_are_refused_where_chunks_are_computed() -> None:
    with pytest.raises(ConfigError, match="neighbouring chunks") as raised:
        make_config(model={"attention": "local"}, mup={"base_width": 64}, memory={"attention_heads_at_once": 2})
    assert raised.value.key == "memory.attention_heads_at_once"


def test_a_list_of_kinds_is_read_from_the_command_line_and_kept_by_a_dump(tmp_path: Any) -> None:
    from ipu_lean.config import dump_config

    (tmp_path / "a.yaml").write_text("mup: {base_width: 64}\nmodel: {depth: 4}\n")
    config = load_config(tmp_path / "a.yaml", ["model.attention=[local,lsh]", "model.lsh.buckets=[4, 8]"])
    assert config.model.attention == ["local", "lsh"] and config.model.lsh.buckets == [4, 8]
    assert load_config(dump_config(config)) == config


def test_draws_fall_between_device_calls() -> None:
    """Three updates a call: what update 4 hashes with was drawn before the call that it belongs to."""
    section = model(attention="lsh", lsh={"redraw_every": 2})
    assert [layer_kinds.draw_of(section, update, 3) for update in range(10)] == [0, 0, 0, 2, 2, 2, 6, 6, 6, 8]
    due = [layer_kinds.draw_before(section, update, 3) for update in range(10)]
    assert due == [0, None, None, 2, None, None, 6, None, None, 8]
    assert [layer_kinds.standing_draw(section, updates, 3) for updates in (0, 1, 3, 4, 9)] == [0, 0, 0, 2, 6]


def test_short_sequences_are_not_hashed() -> None:
    assert layer_kinds.redraws(model(attention="lsh", seq=128)) and not layer_kinds.redraws(model(attention="lsh", seq=64))
    assert not layer_kinds.redraws(model(attention="lsh", seq=128, lsh={"full_below": 128}))
    assert not layer_kinds.redraws(model(attention="lsh", seq=128, lsh={"redraw_every": 0})) and not layer_kinds.redraws(model())
