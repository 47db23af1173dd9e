"""An mlp on images through the commands: it learns, goes on where it stood, is measured, and agrees on two devices."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipu_lean.config import dump_config, load, load_config
from ipu_lean.errors import CheckpointError, ConfigError, RunError
from ipu_lean.ipu.check import check
from ipu_lean.parity.commands import run_parity
from ipu_lean.train import run_eval, run_generate, run_resume, run_train
from ipu_lean.train.compile import run_compile
from ipu_lean.train.progress import Reporter
from ipu_lean.train.tasks import open_task
from tests.data.images.helpers import draw, image_config, write_npz
from tests.train.helpers import timeless

pytestmark = pytest.mark.pod
QUIET = Reporter("none")
FINAL = "checkpoints/step-00000012"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> Any:
    """(folder, summary) of a finished run."""
    folder = tmp_path_factory.mktemp("images")
    summary = run_train(load(dump_config(image_config(folder, optimizer={"lr": 0.03}))), str(folder / "run"), QUIET)
    return folder, summary


def test_it_learns_and_describes_itself(trained: Any) -> None:
    folder, summary = trained
    assert summary["status"] == "ok" and summary["tokens"] == 12 * 8
    valid = summary["metrics"]["eval"]["valid"]
    assert valid["tokens"] == 30 and valid["loss"] < 0.8 < summary["metrics"]["first_loss"]
    assert load_config(folder / "run").model.features == 16
    assert not (folder / "run" / "sample.txt").exists() and not (folder / "run" / FINAL / "tokenizer").exists()


def test_a_run_goes_on_to_the_same_bits_without_its_images(trained: Any, tmp_path: Path) -> None:
    folder, _ = trained
    shutil.copytree(folder / "run", tmp_path / "run")
    for step in (8, 12):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    (folder / "images.npz").rename(folder / "away.npz")
    try:
        run_resume(str(tmp_path / "run"), report=QUIET)
        measured = run_eval(str(tmp_path / "run"), checkpoint="last", report=QUIET)
    finally:
        (folder / "away.npz").rename(folder / "images.npz")
    assert kept in ([], ["step-00000004"])
    for name in ("model.safetensors", "optimizer.pt", "trainer.json"):
        assert (tmp_path / "run" / FINAL / name).read_bytes() == (folder / "run" / FINAL / name).read_bytes(), name
    assert timeless(tmp_path / "run" / "metrics.jsonl") == timeless(folder / "run" / "metrics.jsonl")
    records = [record for record in timeless(folder / "run" / "metrics.jsonl") if record["split"] == "valid"]
    assert measured["metrics"]["valid"]["loss"] == pytest.approx(records[-1]["loss"], rel=1e-6)


def test_other_images_are_measured_as_the_runs_own_scale_has_them(trained: Any, tmp_path: Path) -> None:
    folder, _ = trained
    other = write_npz(tmp_path / "other.npz", 50, seed=4)
    summary = run_eval(str(folder / "run"), data=str(other), report=QUIET)
    assert list(summary["metrics"]) == ["data"] and summary["metrics"]["data"]["tokens"] == 50
    from ipu_lean.train.reuse import open_run

    used = open_run(str(folder / "run"), "best", QUIET)
    train = open_task(used.config).prepared.train
    flat, labels = draw(50, seed=4)
    images = (flat.reshape(50, -1).astype(np.float32) - np.float32(train.mean)) / np.float32(train.std)
    import torch

    logits = used.model(torch.from_numpy(images)).double()
    wanted = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels)).item()
    assert summary["metrics"]["data"]["loss"] == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(ConfigError) as caught:
        run_eval(str(folder / "run"), data="nothing.npz", report=QUIET)
    assert caught.value.key == "--data"


def test_it_generates_no_text(trained: Any) -> None:
    with pytest.raises(ConfigError, match="classifies images"):
        run_generate(str(trained[0] / "run"), report=QUIET)


def test_changed_images_are_noticed(trained: Any, tmp_path: Path) -> None:
    folder, _ = trained
    config = image_config(tmp_path)
    task = open_task(config)
    task.note(tmp_path / "data.json")
    write_npz(tmp_path / "images.npz", seed=1)
    assert open_task(config, record=tmp_path / "data.json").fingerprint() == task.fingerprint()
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(RunError, match="images have changed"):
        open_task(config, record=tmp_path / "data.json")
    shutil.copytree(folder / "run", tmp_path / "run")
    task.note(tmp_path / "run" / "data.json")  # other images than the checkpoint's
    open_task(config).note(tmp_path / "run" / "data.json")
    with pytest.raises(CheckpointError, match="other data"):
        run_resume(str(tmp_path / "run"), ["train.steps=16"], QUIET)


def test_wrong_sizes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an image has 16 numbers") as caught:
        open_task(image_config(tmp_path, model={"features": 17}))
    assert caught.value.key == "model.features"
    with pytest.raises(ConfigError, match="90 images to train on; one global batch needs 96") as caught:
        run_train(load(dump_config(image_config(tmp_path, batch={"micro": 48}))), str(tmp_path / "run"), QUIET)
    assert caught.value.key == "batch" and not (tmp_path / "run").exists()


@pytest.mark.parametrize("layers", [[2], [1, 1]])
def test_two_devices_give_the_same_numbers(tmp_path: Path, layers: Any) -> None:
    changes = {"batch": {"accumulation": 3, "device_iterations": 2}, "ipu": {"layers_per_ipu": layers}}
    config = image_config(tmp_path, device="ipu-emulated", optimizer={"lr": 0.01}, **changes)
    result = check(config)
    assert result.verdict == "pass", result.findings
    assert any("24 images" in line for line in result.batch)
    summary = run_parity(load(dump_config(config)), steps=6, out=str(tmp_path / "parity"))
    assert summary["verdict"] == "pass" and summary["metrics"]["muted"] == []
    assert len(summary["metrics"]["losses"]["candidate"]) == 6
    compiled = run_compile(load(dump_config(config)))
    assert compiled["metrics"]["stages"] == len(layers)


def test_parity_notices_a_fault_in_one_layer(tmp_path: Path) -> None:
    from ipu_lean.errors import VerdictFailed

    def spoil(model: Any) -> None:
        model.layers[1].activation = "silu"

    with pytest.raises(VerdictFailed, match="layers.1"):
        run_parity(load(dump_config(image_config(tmp_path))), steps=2, out=str(tmp_path / "parity"), edit=spoil)


def test_an_emulated_ipu_trains_and_measures(tmp_path: Path) -> None:
    changes = {"batch": {"accumulation": 2, "device_iterations": 2}, "optimizer": {"lr": 0.03}, "train": {"steps": 8}}
    runs = {}
    for device in ("cpu", "ipu-emulated"):
        config = image_config(tmp_path, device=device, **changes)
        runs[device] = run_train(load(dump_config(config)), str(tmp_path / device), QUIET)["metrics"]["eval"]["valid"]
    assert runs["cpu"]["tokens"] == runs["ipu-emulated"]["tokens"] == 30
    assert runs["cpu"]["loss"] == pytest.approx(runs["ipu-emulated"]["loss"], rel=1e-5)
