"""What an update inside the backward pass cannot be joined with is refused by its key, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from ipu_lean.config import make_config
from ipu_lean.errors import ConfigError
from ipu_lean.sweep.alike import unfit

pytestmark = pytest.mark.pod


def config(**sections: Any) -> Any:
    sections["train"] = {"clip": None, **sections.get("train", {})}
    return make_config(**{"memory": {"fused_update": True}, "mup": {"base_width": 64}, **sections})


@pytest.mark.parametrize(
    ("sections", "key", "reason"),
    [
        ({"train": {"clip": 1.0}}, "train.clip", "global norm"),
        ({"batch": {"accumulation": 2}}, "batch.accumulation", "all be alive"),
        ({"batch": {"replicas": 2}}, "batch.replicas", "in turn"),
        ({"train": {"processes": 2}, "batch": {"replicas": 2}}, "train.processes", "exchange"),
        ({"train": {"strategy": "fsdp"}}, "train.strategy", "exchange"),
        ({"train": {"strategy": "ddp"}}, "train.strategy", "exchange"),
        ({"precision": "fp16-mixed"}, "precision", "loss scale"),
        ({"device": "ipu-emulated"}, "memory.fused_update", "PopTorch"),
        ({"device": "ipu"}, "memory.fused_update", "PopTorch"),
    ],
)
def test_refused(sections: Any, key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    assert caught.value.key == key and reason in str(caught.value)


def test_default_clipping_is_what_a_beginner_meets() -> None:
    with pytest.raises(ConfigError, match=r"`train.clip: 1.0`.*Set `train.clip: null`"):
        make_config(memory={"fused_update": True}, mup={"base_width": 64})


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-pure"])
def test_accepted(precision: str) -> None:
    assert config(precision=precision).memory.fused_update


def test_trials_with_it_are_not_trained_as_one_program() -> None:
    assert "memory.fused_update" in str(unfit(config()))
    assert unfit(config(memory={})) is None


def test_an_mlp_may_have_it() -> None:
    images = {"images": "digits", "validation": {}}
    assert config(model={"kind": "mlp", "width": 64}, data=images).memory.fused_update
