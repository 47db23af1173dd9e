"""Every shipped YAML loads, builds and explains itself; the tiny one trains."""

import glob
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipu_lean.cli import main
from ipu_lean.config import dump_config, load, load_config
from ipu_lean.config.yaml_text import parse

pytestmark = pytest.mark.pod
ROOT = Path(__file__).parents[1]
FILES = sorted(glob.glob(str(ROOT / "configs" / "*.yaml")))


def test_the_configs_are_found():
    wanted = {"quickstart.yaml", "tiny_cpu.yaml", "lean_gpt_medium.yaml", "cifar_mlp.yaml"}
    assert wanted <= {os.path.basename(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=os.path.basename)
def test_loads_and_survives_its_own_dump(path):
    loaded = load(path)
    assert load_config(dump_config(loaded.config)) == loaded.config
    assert loaded.config.name != "run"


@pytest.mark.parametrize("path", FILES, ids=os.path.basename)
def test_builds_and_explains_itself(path, capsys):
    """`explain` builds the model on `meta` with its roles and its optimizer."""
    assert main(["explain", path, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]["tensors"]
    config = load_config(path)
    assert len(rows) > 4 * config.model.depth / 3
    first = "embedding" if config.model.kind == "gpt" else "input"
    assert {first, "hidden", "vector"} <= {row["kind"] for row in rows}
    assert all(row["lr"] > 0 for row in rows)


@pytest.mark.parametrize("path", FILES, ids=os.path.basename)
def test_every_section_is_commented(path):
    """A config that ships teaches: it begins with a comment and explains its choices."""
    text = Path(path).read_text(encoding="utf-8")
    assert text.startswith("#")
    assert parse(text, path)[0]
    lines = [line for line in text.splitlines() if line.strip()]
    assert sum("#" in line for line in lines) >= len(lines) / 6


def test_lean_gpt_medium_is_the_model_of_the_study():
    model = load_config(ROOT / "configs" / "lean_gpt_medium.yaml").model
    assert (model.depth, model.width, model.heads, model.ffn_width, model.vocab) == (24, 1024, 16, 4096, 50308)
    assert (model.positions, model.tied, model.stack.kind) == ("rotary", False, "reversible")
    assert load_config(ROOT / "configs" / "lean_gpt_medium.yaml").mup.parametrization == "standard"


def train(name, tmp_path):
    """The summary of training a config as a user does, from another folder."""
    command = [sys.executable, "-m", "ipu_lean", "train", str(ROOT / "configs" / name), "--json"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command += ["--out", str(tmp_path / "run"), f"data.cache={tmp_path / 'cache'}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=str(tmp_path), env=environ)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (tmp_path / "run" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    return summary


def test_tiny_trains(tmp_path):
    summary = train("tiny_cpu.yaml", tmp_path)
    assert summary["steps"] == 60
    assert summary["metrics"]["eval"]["valid"]["loss"] < summary["metrics"]["first_loss"] - 1


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="its digits are in scikit-learn, an extra")
def test_the_mlp_reads_digits(tmp_path):
    summary = train("cifar_mlp.yaml", tmp_path)
    assert summary["metrics"]["eval"]["valid"]["tokens"] == 359
    assert summary["metrics"]["eval"]["valid"]["accuracy"] > 0.94
