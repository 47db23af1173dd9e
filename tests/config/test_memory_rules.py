"""The memory section: what contradicts itself or the stack is refused by name."""

from __future__ import annotations

import pytest

from ipu_lean.config import derived, load_config, make_config
from ipu_lean.errors import ConfigError

pytestmark = pytest.mark.pod


def config(memory, **sections):
    sections.setdefault("model", {"depth": 4})
    return make_config(memory=memory, mup={"parametrization": "standard"}, **sections)


@pytest.mark.parametrize(
    ("memory", "model", "key"),
    [
        ({"engine": "store", "keep_last": 1}, {}, "memory.keep_last"),
        ({"keep_last": 1}, {"stack": {"kind": "residual"}}, "memory.keep_last"),
        ({"keep_last": 5}, {}, "memory.keep_last"),
        ({"keep_last": 1}, {"stack": {"order": "aaff"}}, "memory.keep_last"),
        ({"segments": [{"layers": 3}]}, {}, "memory.segments"),
        ({"segments": []}, {}, "memory.segments"),
        ({"segments": [{"layers": 4}], "keep_last": 1}, {}, "memory.keep_last"),
        ({"segments": [{"layers": 4}], "engine": "invert"}, {}, "memory.engine"),
        ({"segments": [{"layers": 4, "engine": "store", "checkpoint_every": 2}]}, {}, "memory.segments.0.checkpoint_every"),
        ({"segments": [{"layers": 4, "engine": "invert"}]}, {"stack": {"kind": "residual"}}, "memory.segments.0.engine"),
        ({"segments": [{"layers": 1}, {"layers": 3}]}, {"stack": {"order": "aaff"}}, "memory.segments.0.layers"),
        ({"ffn_chunk": -1}, {}, "memory.ffn_chunk"),
    ],
)
def test_refused(memory, model, key):
    with pytest.raises(ConfigError) as caught:
        config(memory, model={"depth": 4, **model})
    assert caught.value.key == key


@pytest.mark.parametrize(
    "memory",
    [{"ffn_chunk": 64}, {"attention_heads_at_once": 2}, {"keep_last": 1}, {"segments": [{"layers": 4, "engine": "invert"}]}],
)
@pytest.mark.parametrize("device", ["ipu", "ipu-emulated"])
def test_an_ipu_has_no_levers(memory, device):
    with pytest.raises(ConfigError) as caught:
        config(memory, device=device)
    assert caught.value.key == f"memory.{next(iter(memory))}"


def test_what_is_left_of_the_stack():
    assert derived.segments(config({})) is None
    assert derived.segments(config({"keep_last": 1})) == ((3, "invert", 1), (1, "store", 1))
    assert derived.segments(config({"keep_last": 4})) == ((4, "store", 1),)
    found = config({"engine": "checkpoint", "checkpoint_every": 2, "keep_last": 1})
    assert derived.segments(found) == ((3, "checkpoint", 2), (1, "store", 1))


def test_segments_in_yaml():
    text = """
        model: {depth: 4}
        mup: {parametrization: standard}
        memory:
          segments:
            - {layers: 1, engine: checkpoint}
            - {layers: 3, engine: invert}
    """
    assert derived.segments(load_config(text)) == ((1, "checkpoint", 1), (3, "invert", 1))
