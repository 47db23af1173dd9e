"""A gpt and an mlp read different keys, and what one would not read is refused by its name."""

from __future__ import annotations

from typing import Any, Dict

import pytest

from ipu_lean.config import make_config
from ipu_lean.config.layout import layout, stages
from ipu_lean.errors import ConfigError

pytestmark = pytest.mark.pod


def mlp(**changes: Any) -> Any:
    sections: Dict[str, Any] = {
        "model": {"kind": "mlp", "width": 16, "depth": 2}, "mup": {"base_width": 8}, "data": {"images": "digits"},
    }
    for name, value in changes.items():
        sections[name] = {**sections[name], **value} if isinstance(value, dict) and name in sections else value
    return make_config(**sections)


def test_what_an_mlp_reads_is_accepted() -> None:
    config = mlp(
        model={"activation": "silu", "bias": False, "dropout": 0.1, "features": 64},
        mup={"depth_rule": "none", "readout_zero_init": False, "init_scale": 2.0, "output_mult": 0.5},
        memory={"engine": "store", "loss_chunk": 3},
        data={"validation": {"valid": 0.1}, "shuffle": False, "cache": "somewhere"},
    )
    assert config.model.features == 64
    assert mlp(mup={"base_width": None, "base": {"kind": "mlp", "width": 4}}).mup.base.width == 4


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"model": {"heads": 2}}, "model.heads"),
        ({"model": {"head_size": 4}}, "model.head_size"),
        ({"model": {"seq": 32}}, "model.seq"),
        ({"model": {"vocab": 300}}, "model.vocab"),
        ({"model": {"norm": "rmsnorm"}}, "model.norm"),
        ({"model": {"tied": False}}, "model.tied"),
        ({"model": {"stack": {"kind": "residual"}}}, "model.stack.kind"),
        ({"model": {"stack": {"order": "aaff"}}}, "model.stack.order"),
        ({"model": {"attention": "fused"}}, "model.attention"),
        ({"model": {"embedding_dropout": 0.1}}, "model.embedding_dropout"),
        ({"model": {"activation": "geglu"}}, "model.activation"),
        ({"mup": {"base_width": None, "base": {"kind": "mlp", "width": 4, "seq": 8}}}, "mup.base.seq"),
        ({"mup": {"depth_rule": "completep"}}, "mup.depth_rule"),
        ({"mup": {"base_depth": 4}}, "mup.base_depth"),
        ({"mup": {"attention_mult": 2.0}}, "mup.attention_mult"),
        ({"mup": {"embedding_std": 0.2}}, "mup.embedding_std"),
        ({"memory": {"engine": "invert"}}, "memory.engine"),
        ({"memory": {"engine": "checkpoint", "checkpoint_every": 2}}, "memory.engine"),
        ({"memory": {"ffn_chunk": 8}}, "memory.ffn_chunk"),
        ({"memory": {"ipu_backward": "surrogate"}}, "memory.ipu_backward"),
        ({"data": {"corpus": "kjv"}}, "data.corpus"),
        ({"data": {"tokenizer": {"kind": "bpe"}}}, "data.tokenizer.kind"),
        ({"data": {"limit": 100}}, "data.limit"),
        ({"data": {"images": None}}, "data.images"),
        ({"train": {"sample": {"tokens": 5}}}, "train.sample.tokens"),
        ({"ipu": {"embedding_ipu": 1}}, "ipu.embedding_ipu"),
    ],
)
def test_what_an_mlp_would_not_read_is_refused(changes: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mlp(**changes)
    assert caught.value.key == key and caught.value.rule.startswith(("an mlp", "images have"))


def test_a_gpt_has_no_images() -> None:
    for changes, key in (({"data": {"images": "digits"}}, "data.images"), ({"model": {"features": 8}}, "model.features")):
        with pytest.raises(ConfigError, match="a gpt") as caught:
            make_config(mup={"base_width": 64}, **changes)
        assert caught.value.key == key


def test_an_mlp_on_ipus() -> None:
    """The path begins with the first layer, and the readout stays with the last."""
    device = {"device": "ipu-emulated", "batch": {"accumulation": 3}}
    config = mlp(ipu={"layers_per_ipu": [1, 1]}, **device)
    assert layout(config).path == [0, 1] and stages(config) == 2
    with pytest.raises(ConfigError, match="IPU 0 would hold nothing"):
        mlp(ipu={"layers_per_ipu": [0, 2]}, **device)
