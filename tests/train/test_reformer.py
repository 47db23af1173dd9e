"""A small Reformer through the commands: it trains, goes on to the same last bit, and is evaluated as it was trained."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.train.helpers import timeless, write_yaml

pytestmark = pytest.mark.pod
STEPS = 8
FINAL = f"checkpoints/step-{STEPS:08d}"
SECTIONS = {
    "model": {
        "width": 16, "depth": 4, "heads": 2, "head_size": 8, "seq": 22, "dropout": 0.1, "attention_dropout": 0.1, "tied": False,
        "embedding_dropout": 0.1, "attention": ["local", "lsh"], "local": {"chunk": 8}, "positions": "axial",
        "lsh": {"chunk": 4, "hashes": 2, "redraw_every": 3}, "attention_bias": False, "readout_bias": True,
        "stack": {"output": "concat"},
    },
    "mup": {"base_width": None, "parametrization": "standard"},
    "train": {"steps": STEPS, "eval_every": 4, "save_every": 2, "log_every": 1, "sample": {"tokens": 8}},
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(zygote: Any, tmp_path_factory: Any) -> Any:
    """(YAML, run directory of an uninterrupted run)."""
    folder = tmp_path_factory.mktemp("reformer")
    config = write_yaml(folder, **SECTIONS)
    ended = zygote.run(["train", config, "--out", folder / "run"])
    assert ended.code == 0, ended.err
    return config, folder / "run", ended.operations


def losses(run: Path) -> Any:
    return [record["loss"] for record in timeless(run / "metrics.jsonl") if record["split"] == "train"]


def test_it_learns(whole: Any) -> None:
    found = losses(whole[1])
    assert len(found) == STEPS and found[-1] < found[0] - 0.5


@pytest.mark.parametrize("share", [0.5, 0.75])
def test_a_killed_run_goes_on_to_the_same_last_bit(zygote: Any, whole: Any, tmp_path: Path, share: float) -> None:
    """With buckets drawn anew every third update, and checkpoints every second one."""
    config, reference, operations = whole
    run = tmp_path / "run"
    assert zygote.run(["train", config, "--out", run], kill_at=int(share * (operations - 12))).code == -signal.SIGKILL
    ended = zygote.run(["resume", run])
    assert ended.code == 0, ended.err
    for name in ("model.safetensors", "optimizer.pt", "trainer.json"):
        assert (run / FINAL / name).read_bytes() == (reference / FINAL / name).read_bytes(), name
    assert timeless(run / "metrics.jsonl") == timeless(reference / "metrics.jsonl")


def evaluated(zygote: Any, run: Path, *overrides: str) -> Any:
    ended = zygote.run(["eval", run, "--checkpoint", "last", "--json", *overrides])
    assert ended.code == 0, ended.err
    return json.loads(ended.out.splitlines()[-1])["metrics"]["valid"]["loss"]


def test_eval_hashes_as_training_did_and_with_more_rounds_if_asked(zygote: Any, whole: Any) -> None:
    run = whole[1]
    recorded = [record["loss"] for record in timeless(run / "metrics.jsonl") if record["split"] == "valid"][-1]
    assert evaluated(zygote, run) == pytest.approx(recorded, rel=1e-6)
    more = evaluated(zygote, run, "model.lsh.hashes=6")
    assert more != pytest.approx(recorded, rel=1e-6) and more == pytest.approx(recorded, rel=0.05)
    ended = zygote.run(["eval", run, "model.attention=[lsh,local]"])
    assert ended.code == 2 and "model.attention" in ended.err
    ended = zygote.run(["eval", run, "model.lsh.chunk=8"])
    assert ended.code == 2 and "another model" in ended.err


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16-mixed"},
        {"precision": "bf16-pure", "optimizer": {"kind": "adamw"}},
        {"memory": {"ffn_chunk": 5, "loss_chunk": 7, "keep_last": 1}},
        {"memory": {"engine": "checkpoint", "checkpoint_every": 2}},
    ],
    ids=["bf16-mixed", "bf16-pure", "chunks", "checkpoint"],
)
def test_it_trains_in_other_ways(zygote: Any, whole: Any, tmp_path: Path, changes: Any) -> None:
    config = write_yaml(tmp_path, **{**SECTIONS, **changes, "train": {**SECTIONS["train"], "steps": 3, "eval_every": 0}})
    ended = zygote.run(["train", config, "--out", tmp_path / "run"])
    assert ended.code == 0, ended.err
    assert losses(tmp_path / "run") == pytest.approx(losses(whole[1])[:3], rel=1e-4 if "memory" in changes else 0.03)
