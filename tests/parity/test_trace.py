"""Traces on disk: whole or not at all, and read back to the last bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ipu_lean.errors import ConfigError
from ipu_lean.parity.trace import load_trace, relative_distance

from .test_compare import side

pytestmark = pytest.mark.pod


def saved(folder: Path) -> Path:
    trace = side(spread={1: {"early": 1e-7}})
    return trace.save(folder / "trace", "seed: 1\n")


def test_everything_comes_back(tmp_path: Path) -> None:
    one, other = side(spread={1: {"early": 1e-7}}), load_trace(saved(tmp_path))
    assert other.start.digest() == one.start.digest() and other.start.zero_gradients == ["noise"]
    assert (other.losses, other.facts, other.updates_per_call, other.spread) == (one.losses, one.facts, 1, one.spread)
    for kind in ("activations", "gradients"):
        assert list(getattr(other, kind)) == list(getattr(one, kind))
        assert all(torch.equal(value, getattr(one, kind)[name]) for name, value in getattr(other, kind).items())
    assert sorted(other.weights) == [1, 2, 4] and torch.equal(other.weights[4]["late"], one.weights[4]["late"])
    assert (tmp_path / "trace" / "config.yaml").read_text() == "seed: 1\n"


@pytest.mark.parametrize("name", ["manifest.json", "gradients.safetensors", "weights-000002.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path)
    (path / name).unlink()
    with pytest.raises(ConfigError) as error:
        load_trace(path)
    assert name in str(error.value)


def test_changed_weights_are_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    other = side()
    other.start.weights["early"] = torch.full((40,), 1.0 + 2.0**-20)
    other.save(tmp_path / "other", "")
    (tmp_path / "other" / "start.safetensors").replace(path / "start.safetensors")
    with pytest.raises(ConfigError) as error:
        load_trace(path)
    assert "not those that were recorded" in str(error.value)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "schema": 99}))
    with pytest.raises(ConfigError) as error:
        load_trace(path)
    assert "schema 99" in str(error.value)


def test_distance_of_nothing() -> None:
    assert relative_distance(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_distance(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])) == pytest.approx(0.2)
