"""The original experiment's script against the mup package itself, and CPU against the emulated IPU."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any, Dict, Tuple

import pytest
import torch
from torch import nn

from ipu_lean.config import load_config
from ipu_lean.models import build_model
from ipu_lean.train.tasks import open_task
from tests.data.images.helpers import write_npz

pytestmark = pytest.mark.pod
ROOT = Path(__file__).parents[1]
NAMES = {"layers.0.linear": "0", "layers.1.linear": "2", "readout": "4"}


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("original_thread", ROOT / "scripts" / "original_thread.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def images(tmp_path_factory: Any) -> Path:
    return write_npz(tmp_path_factory.mktemp("images") / "images.npz", 200, shape=(6, 6), classes=10)


def run(script: Any, images: Path, out: Path, *more: str) -> Dict[Tuple[str, str, str], float]:
    flags = ["--width-lower", "8", "--width-upper", "32", "--width-step", "8", "--training-steps", "3", "--lr", "0.02"]
    assert script.main([*flags, "--images", str(images), "--batch", "32", "--out", str(out), *more]) == 0
    with open(out / "coordinates.csv", encoding="utf-8") as file:
        return {(row["step"], row["width"], row["module"]): float(row["change_std"]) for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def on_cpu(script: Any, images: Path, tmp_path_factory: Any) -> Any:
    return run(script, images, tmp_path_factory.mktemp("cpu"))


def test_the_figures_are_those_of_the_mup_package(on_cpu: Any, images: Path) -> None:
    """Their MuReadout and MuAdam, from our weights, on our batch."""
    mup = pytest.importorskip("mup", reason="the mup package is the reference")
    overrides = [f"data.images={images}", "model.width=24", "mup.readout_zero_init=false"]
    config = load_config(ROOT / "configs" / "cifar_mlp.yaml", overrides)
    task = open_task(config)
    inputs, labels = (torch.from_numpy(array) for array in task.train_batches(32, 0).next())

    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(36, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), mup.MuReadout(width, 10))

    twin = make(24)
    mup.set_base_shapes(twin, make(8), delta=make(16))
    theirs = dict(twin.named_parameters())
    with torch.no_grad():
        for name, parameter in build_model(config, task.vocab).named_parameters():
            layer, _, leaf = name.rpartition(".")
            theirs[f"{NAMES[layer]}.{leaf}"].copy_(parameter)
    twin.double()
    optimizer = mup.MuAdam(twin.parameters(), lr=0.02, betas=tuple(config.optimizer.betas), eps=1e-12)

    def outputs() -> Any:
        h, found = inputs.double(), []
        for place, module in enumerate(twin):
            h = module(h)
            if place in (1, 3, 4):  # a layer of ours has its activation inside
                found.append(h)
        return found

    start = [output.detach() for output in outputs()]
    for step in (1, 2, 3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(outputs()[-1], labels.long()).backward()
        optimizer.step()
        for module, before, after in zip(("layer0", "layer1", "head"), start, outputs()):
            wanted = (after - before).std().item()
            assert wanted > 1e-4
            assert on_cpu[str(step), "24", module] == pytest.approx(wanted, rel=2e-3), (step, module)


def test_the_emulated_ipu_gives_the_same_table(script: Any, images: Path, on_cpu: Any, tmp_path: Path, capsys: Any) -> None:
    if importlib.util.find_spec("poptorch") is not None:
        pytest.skip("here --ipu is a real one")
    found = run(script, images, tmp_path / "ipu", "--ipu")
    said = capsys.readouterr()
    assert "device: ipu-emulated" in said.err and "layer1: standard deviation of x_t - x_0" in said.out
    assert found.keys() == on_cpu.keys() and len(found) == 3 * 4 * 3
    for key, value in found.items():
        assert value == pytest.approx(on_cpu[key], rel=1e-4), key
    assert (tmp_path / "ipu" / "coordinates.png").read_bytes()[:4] == b"\x89PNG"


def test_changes_do_not_depend_on_the_width(on_cpu: Any) -> None:
    for module in ("layer0", "layer1"):
        values = [on_cpu["3", width, module] for width in ("8", "16", "24", "32")]
        assert max(values) < 1.6 * min(values)


@pytest.mark.parametrize(
    "flags", [["--width-upper", "8"], ["--width-step", "0"], ["--training-steps", "0"], ["--images", "nothing.npz"]]
)
def test_mistakes_end_with_the_code_of_a_configuration(script: Any, tmp_path: Path, flags: Any, capsys: Any) -> None:
    flags = ["--width-lower", "8", "--width-upper", "16", "--width-step", "8", "--out", str(tmp_path / "out"), *flags]
    assert script.main(flags) == 2
    assert "error: " in capsys.readouterr().err and not (tmp_path / "out").exists()
