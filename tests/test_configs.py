"""Every shipped YAML loads, builds and explains itself; the tiny one trains."""

import glob
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipu_lean import _compat
from ipu_lean.cli import main
from ipu_lean.config import dump_config, load, load_config
from ipu_lean.config.yaml_text import parse
from ipu_lean.models import build_meta

pytestmark = pytest.mark.pod
ROOT = Path(__file__).parents[1]
FILES = sorted(glob.glob(str(ROOT / "configs" / "*.yaml")))


def test_the_configs_are_found():
    wanted = {"quickstart.yaml", "tiny_cpu.yaml", "lean_gpt_medium.yaml", "cifar_mlp.yaml", *(name for name, _ in POD)}
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


OPT = [("opt_125m_bf16_pure", 125_237_760), ("opt_125m_fp16_mixed", 125_237_760), ("opt_125m_fp32", 125_237_760),
       ("opt_1.3b_bf16_pure", 1_315_753_984)]  # fmt: skip


@pytest.mark.parametrize("name, parameters", OPT)
def test_opt_has_the_published_size_and_recipe(name, parameters):
    """Hugging Face's OPT has two more rows of positions (it counts from 2): 125,239,296 and 1,315,758,080."""
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    model, own = config.model, config.optimizer
    assert sum(parameter.numel() for parameter in build_meta(config, model.vocab).parameters()) == parameters
    assert (model.activation, model.positions, model.norm, model.tied, model.vocab, model.seq) == (
        *("relu", "learned", "layernorm", True, 50272, 2048),
    )
    assert (own.lr, own.betas, own.weight_decay) == (2e-4, (0.9, 0.95), 0.1)
    assert (config.schedule.kind, config.schedule.warmup) == ("linear", 500)
    assert config.precision.replace("-", "_") in name and config.mup.parametrization == "standard"


POD = [
    ("gpt2_small_pod16.yaml", 16), ("gpt2_medium_pod16.yaml", 16), ("gpt2_large_pod16.yaml", 16),
    ("lean_gpt_medium_pod4.yaml", 4), ("gpt2_xl_reversible_pod64.yaml", 64),
]


@pytest.mark.parametrize("path", FILES, ids=os.path.basename)
def test_is_planned(path, capsys):
    """Every configuration can be planned, and only those that were never meant for IPUs do not fit."""
    code = main(["plan", path, "--json"])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code == 4) == (summary["verdict"] == "no")
    assert code == 0 or load_config(path).device == "gpu"
    rows = [row["parameters"] for row in summary["metrics"]["ipus"]]
    assert sum(rows) == summary["metrics"]["parameters"] > 0


@pytest.mark.parametrize("name, pod", POD)
def test_the_configs_for_pods_fit_and_fill_the_pod(name, pod, capsys):
    assert main(["plan", str(ROOT / "configs" / name), "--pod", str(pod), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    metrics, config = summary["metrics"], load_config(ROOT / "configs" / name)
    assert summary["verdict"] == "fits" and metrics["ipus_in_all"] == pod
    assert metrics["replicas"] == config.batch.replicas
    assert config.batch.accumulation >= metrics["minimum_accumulation"] and metrics["bubble"] <= 0.2


@pytest.mark.parametrize("name, pod", POD)
def test_the_configs_for_pods_trace_and_place(name, pod, capsys):
    assert main(["check", str(ROOT / "configs" / name), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    assert metrics["ipus"] == pod and metrics["findings"] == []


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


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure", "fp16_mixed"])
def test_tiny_opt_trains_alike_in_every_precision(precision, tmp_path):
    if precision == "fp16_mixed" and _compat.TORCH < (2, 3):
        pytest.skip("fp16 autocast on CPU needs torch 2.3")
    summary = train(f"opt_tiny_{precision}.yaml", tmp_path)
    assert summary["steps"] == 60
    assert summary["metrics"]["eval"]["valid"]["loss"] < summary["metrics"]["first_loss"] - 1.5


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="its digits are in scikit-learn, an extra")
def test_the_mlp_reads_digits(tmp_path):
    summary = train("cifar_mlp.yaml", tmp_path)
    assert summary["metrics"]["eval"]["valid"]["tokens"] == 359
    assert summary["metrics"]["eval"]["valid"]["accuracy"] > 0.94


def test_the_masked_lm_finds_hidden_characters(tmp_path):
    summary = train("masked_lm_tiny.yaml", tmp_path)
    valid = summary["metrics"]["eval"]["valid"]
    assert valid["loss"] < 3.0 < summary["metrics"]["first_loss"]  # how often each byte occurs gives 3.25
    assert valid["accuracy"] > 0.25 and valid["tokens"] == 8 * 16 * 5  # always a blank: 0.2


def test_the_classifier_tells_documentation_from_code(tmp_path):
    summary = train("classifier_tiny.yaml", tmp_path)
    valid = summary["metrics"]["eval"]["valid"]
    assert valid["accuracy"] > 0.75 and valid["tokens"] > 200


def test_the_tiny_reformer_trains_on_the_emulator(tmp_path):
    """Rotations are redrawn with every call of the device."""
    summary = train("reformer_tiny_ipu.yaml", tmp_path)
    assert (summary["steps"], summary["device"]) == (20, "ipu-emulated")
    assert summary["metrics"]["eval"]["valid"]["loss"] < summary["metrics"]["first_loss"] - 1
