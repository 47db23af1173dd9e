"""Checkpoints: whole or not there, found again, and honest about damage."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, List

import pytest
import torch

from ipu_lean.errors import CheckpointError, ConfigError, RunError
from ipu_lean.train import snapshot as snapshots
from ipu_lean.train.checkpoint import CheckpointStore
from ipu_lean.train.snapshot import Snapshot

pytestmark = pytest.mark.pod


def snapshot(step: int = 1) -> Snapshot:
    weight = torch.arange(6, dtype=torch.float32).view(2, 3) + step
    state = {"a.weight": {"step": torch.tensor(float(step)), "exp_avg": weight * 2}}
    return Snapshot(
        {"a.weight": weight, "b.weight": weight, "c": torch.zeros(2, dtype=torch.bfloat16)},
        {"state": state, "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["a.weight"]}]},
        {"step": step, "lr": 0.1 + 0.2},
        '{"a.weight": {}}',
        lambda folder: Path(folder, "tokenizer.json").write_text("{}") and None,
    )


def store_with(root: Path, steps: List[int], said: Any = None) -> CheckpointStore:
    store = CheckpointStore(root, said.append if said is not None else lambda text: None)
    for step in steps:
        store.write(step, snapshot(step))
    return store


def spoil(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def test_round_trip(tmp_path: Path) -> None:
    store = store_with(tmp_path, [7])
    path = store.find("last")
    assert path == store.find("7") == store.find("step-00000007") == tmp_path / "step-00000007"
    back, put = snapshots.read(path), snapshot(7)
    assert back.model.keys() == put.model.keys() and all(torch.equal(back.model[name], put.model[name]) for name in put.model)
    assert back.model["a.weight"].data_ptr() == back.model["b.weight"].data_ptr(), "tied tensors are one tensor"
    assert back.model["c"].dtype == torch.bfloat16
    assert back.trainer == put.trainer and back.roles == put.roles
    assert torch.equal(back.optimizer["state"]["a.weight"]["exp_avg"], put.optimizer["state"]["a.weight"]["exp_avg"])
    assert back.optimizer["groups"] == put.optimizer["groups"]
    assert (path / "tokenizer" / "tokenizer.json").is_file()
    assert snapshots.read(path, weights_only=True).optimizer == {}


def test_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    one, other = (store_with(tmp_path / name, [3]).find("last") for name in ("one", "other"))
    for file in one.rglob("*"):
        if file.is_file():
            assert file.read_bytes() == (other / file.relative_to(one)).read_bytes(), file.name


def test_bare_torch_reads_the_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = store_with(tmp_path, [1]).find("last")
    assert torch.equal(load_file(str(path / "model.safetensors"))["a.weight"], snapshot(1).model["a.weight"])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "roles.json", "trainer.json", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("how", ["spoiled", "cut", "gone"])
def test_every_damage_is_noticed_and_an_older_one_is_used(tmp_path: Path, name: str, how: str) -> None:
    said: List[str] = []
    store = store_with(tmp_path, [1, 2], said)
    file = tmp_path / "step-00000002" / name
    if how == "spoiled":
        spoil(file)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    assert store.latest() == tmp_path / "step-00000001"
    assert name in said[0] and "`last` names step-00000002; using step-00000001" in said[1]
    with pytest.raises(CheckpointError, match="step-00000002 is damaged.*`--checkpoint last`"):
        store.find("2")
    store.put_aside_after(store.latest())
    assert store.steps() == [1] and (tmp_path / "damaged-step-00000002").is_dir()


def test_manifest_damage_and_foreign_schema(tmp_path: Path) -> None:
    store = store_with(tmp_path, [1, 2])
    manifest = tmp_path / "step-00000002" / "manifest.json"
    text = manifest.read_text()
    for broken in ("", text[:-9], "[]", text.replace('"schema": 1', '"schema": 9')):
        manifest.write_text(broken)
        assert store.latest() == tmp_path / "step-00000001"
    files = json.loads(text)
    del files["files"]["roles.json"]
    manifest.write_text(json.dumps(files))
    assert snapshots.damage(tmp_path / "step-00000002") == "roles.json is not in the manifest"


@pytest.mark.parametrize("last", ["step-00000001\n", "step-00000009\n", "rubbish", "", None])
def test_stale_or_damaged_last_is_overruled_aloud(tmp_path: Path, last: Any) -> None:
    said: List[str] = []
    store = store_with(tmp_path, [1, 2], said)
    (tmp_path / "last").unlink() if last is None else (tmp_path / "last").write_text(last)
    assert store.latest() == tmp_path / "step-00000002"
    assert len(said) == 1 and "using step-00000002, the newest whole checkpoint" in said[0]


def test_nothing_to_find(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none")
    assert store.steps() == [] and store.latest() is None and not store.has_best()
    for which, kind, words in (
        ("last", CheckpointError, "no whole checkpoint"),
        ("best", CheckpointError, "names no best"),
        ("3", ConfigError, "--checkpoint: '3'.*Steps with a checkpoint: none"),
        ("x", ConfigError, "--checkpoint: 'x'.*neither"),
    ):
        with pytest.raises(kind, match=words):
            store.find(which)


def test_prune_keeps_the_last_ones_and_the_best(tmp_path: Path) -> None:
    store = store_with(tmp_path, [2, 4, 6, 8, 10])
    store.mark_best(4)
    assert store.prune(2, 4) == [2, 6]
    assert store.steps() == [4, 8, 10] and store.find("best").name == "step-00000004"
    assert not list(tmp_path.glob(".*"))
    assert store.prune(1, None) == [4, 8]


def test_a_full_disk_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with(tmp_path, [1])
    calls = {"count": 0}
    original = snapshots.fsync_file

    def full(path: Any) -> None:
        calls["count"] += 1
        if calls["count"] == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path)

    monkeypatch.setattr(snapshots, "fsync_file", full)
    with pytest.raises(RunError, match="the disk is full.*step-00000002 was not written, the ones before it are untouched"):
        store.write(2, snapshot(2))
    assert store.steps() == [1] and store.latest() == tmp_path / "step-00000001"
    assert sorted(os.listdir(tmp_path)) == ["last", "step-00000001"]


def test_damage_under_the_same_name_is_replaced(tmp_path: Path) -> None:
    store = store_with(tmp_path, [1, 2])
    spoil(tmp_path / "step-00000002" / "model.safetensors")
    store.write(2, snapshot(2))
    assert store.latest() == tmp_path / "step-00000002"
    stamp = (tmp_path / "step-00000002" / "manifest.json").stat().st_mtime_ns
    store.write(2, snapshot(2))
    assert (tmp_path / "step-00000002" / "manifest.json").stat().st_mtime_ns == stamp, "a whole one is not written again"


def test_clean_removes_leftovers_only(tmp_path: Path) -> None:
    store = store_with(tmp_path, [1])
    for name in (".tmp-step-00000002-77", ".trash-step-00000001-77"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("x")
    (tmp_path / ".last.tmp-77").write_text("x")
    store.clean()
    assert sorted(os.listdir(tmp_path)) == ["last", "step-00000001"]


def test_load_into_lists_differences(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    good = {name: value + 1 for name, value in model.state_dict().items()}
    snapshots.load_into(model, good, tmp_path)
    assert torch.equal(model.weight, good["weight"])
    with pytest.raises(
        CheckpointError, match=r"bias is missing; other is unknown; weight has shape \[3, 5\], the model \[3, 2\]"
    ):
        snapshots.load_into(model, {"weight": torch.zeros(3, 5), "other": torch.zeros(1)}, tmp_path)


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    path = store_with(tmp_path, [1]).find("last")
    marker = tmp_path / "ran"

    class Bad:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(marker),)

    torch.save({"state": Bad()}, path / "optimizer.pt")
    with pytest.raises(CheckpointError, match="optimizer.pt cannot be read"):
        snapshots.read(path)
    assert not marker.exists()
