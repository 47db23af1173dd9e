"""What a variant may change, and what it may not."""

from __future__ import annotations

import pytest

from ipu_lean.config import config_hash
from ipu_lean.errors import ConfigError
from ipu_lean.sweep.study.variants import SHARED, variants_of
from ipu_lean.train.banner import flat
from tests.sweep.helpers import tiny

pytestmark = pytest.mark.pod


def study(tmp_path, variants, **more):
    return tiny(tmp_path, study={"variants": variants, **more})


def test_trials_differ_in_what_is_named_and_in_the_seed(tmp_path):
    config = study(tmp_path, {"plain": {}, "rate": {"optimizer.lr": 0.02}}, seeds=2)
    found = variants_of(config)
    assert list(found) == ["plain", "rate"]
    assert [trial.axes for trial in found["rate"]] == [{"variant": "rate", "seed": 0}, {"variant": "rate", "seed": 1}]
    first, other = (flat(found[name][1].config) for name in ("plain", "rate"))
    assert {key for key in first if first[key] != other.get(key)} == {"optimizer.lr"}
    assert first["seed"] == 1 and found["plain"][0].config.study is None


def test_a_study_belongs_to_no_run(tmp_path):
    assert config_hash(study(tmp_path, {"plain": {}})) == config_hash(tiny(tmp_path))


@pytest.mark.parametrize("key", [key for key in SHARED if "." in key] + ["data.corpus", "batch.micro", "seed", "device", "model"])
def test_what_all_variants_share(tmp_path, key):
    with pytest.raises(ConfigError, match="no variant's own"):
        variants_of(study(tmp_path, {"odd": {key: 1}}))


@pytest.mark.parametrize(
    ("variants", "words"),
    [
        ({}, "nothing to compare"),
        ({"a": {"optimizer.lrr": 1.0}}, "did you mean `optimizer.lr`"),
        ({"a": {"model.width": 17}}, "in the variant a"),
        ({"a": {"mup.base.width": 8}}, "`mup.base` is None, so it has no width to set .in the variant a"),
    ],
)
def test_refused(tmp_path, variants, words):
    with pytest.raises(ConfigError, match=words):
        variants_of(study(tmp_path, variants))


@pytest.mark.parametrize("seeds", [0, [], [1, 1]])
def test_seeds(tmp_path, seeds):
    with pytest.raises(ConfigError):
        study(tmp_path, {"a": {}}, seeds=seeds)
