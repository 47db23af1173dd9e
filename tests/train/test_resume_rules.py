"""What a resumed run may change, without running one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ipu_lean.config import dump_config
from ipu_lean.errors import ConfigError
from ipu_lean.train.banner import flat
from ipu_lean.train.resume import SAFE, differing, is_safe, resumed_config
from tests.train.helpers import tiny_config

pytestmark = pytest.mark.pod


@pytest.fixture()
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(tiny_config(tmp_path)))
    return path


def test_the_page_lists_what_the_code_allows() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "resume.md").read_text(encoding="utf-8")
    listed = page.partition("Overrides may change")[2].partition("; with it")[0]
    assert sorted(name.replace("…", "") for name in re.findall(r"`([^`]+)`", listed)) == sorted(SAFE)


def test_every_key_is_either_safe_or_refused(file: Path) -> None:
    unknown = [name for name in SAFE if not any(key == name or key.startswith(name) for key in flat(resumed_config(file, [])[0]))]
    assert unknown == [], "SAFE names keys that do not exist"
    computed = (
        "seed",
        "precision",
        "model.",
        "mup.",
        "memory.",
        "batch.",
        "data.corpus",
        "optimizer.",
        "schedule.warmup",
        "train.clip",
    )
    for key in flat(resumed_config(file, [])[0]):
        if key.startswith(computed) and key != "memory.fused_update":  # which changes no bit: test_fused_update.py
            assert not is_safe(key), key


def test_more_steps_pin_the_horizon(file: Path) -> None:
    config, changed = resumed_config(file, ["train.steps=20", "logging.csv=false"])
    assert changed == ["logging.csv", "train.steps"] and config.train.steps == 20 and config.schedule.steps == 12
    file.write_text(dump_config(config))
    again, changed = resumed_config(file, ["train.steps=30"])
    assert again.schedule.steps == 12 and changed == ["train.steps"]


def test_another_cache_is_the_same_from_every_folder(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, changed = resumed_config(file, ["data.cache=here"])
    assert changed == ["data.cache"] and config.data.cache == str(tmp_path / "here")


@pytest.mark.parametrize(
    "override",
    ["train.steps=11", "optimizer.lr=1e-3", "seed=4", "schedule.steps=99", "memory.engine=store", "precision=bf16-mixed"],
)
def test_refused(file: Path, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resumed_config(file, [override])
    assert caught.value.key == override.split("=")[0]


def test_keys_of_other_releases_stand_at_their_defaults(file: Path) -> None:
    now = flat(resumed_config(file, [])[0])
    older = {key: value for key, value in now.items() if key != "optimizer.decay_vectors"}
    assert differing(older, now) == [] == differing({**now, "a.key.that.went": 1}, now)
    assert differing({**older, "seed": 9}, {**now, "optimizer.decay_vectors": True}) == ["optimizer.decay_vectors", "seed"]
