"""The whole command: from beginning to end, what flags mean, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ipu_lean import cli
from ipu_lean.config import load_config
from ipu_lean.sweep.grid import expand
from ipu_lean.sweep.trial import run_trial
from tests.sweep.commandline import planned, sweep, table

pytestmark = pytest.mark.pod


def test_a_sweep_from_beginning_to_end(capsys, yaml):
    flags = ["--widths", "16,32", "--lrs", "1e-3,1e-2,1e-1", "--executor", "sequential", "--evaluate"]
    code, summary, out, err = sweep(capsys, yaml, *flags, "--out", "out")
    assert code == 0 and summary["verdict"] == "inconclusive" and "warning: inconclusive" in err
    assert summary["metrics"]["counts"] == {"trials": 6, "done": 6, "diverged": 0, "failed": 0, "missing": 0}
    for name in ("results", "table", "plot", "steps"):
        assert Path(summary["artifacts"][name]).stat().st_size > 100
    assert out.startswith((Path("out") / "table.txt").read_text()) and "trial 6/6" not in err  # logging.progress: none
    kept = json.loads((Path("out") / "summary.json").read_text())
    assert kept["command"] == "sweep" and kept["verdict"] == "inconclusive" and "table" not in kept
    config = load_config("out")
    rows = table(Path("out"))
    for trial, row in zip(expand(config, config.sweep), rows):
        result = run_trial(trial)
        assert (row["id"], float(row["loss"]), float(row["valid_valid"])) == (trial.id, result.loss, result.valid["valid"])
        assert (int(row["width"]), float(row["lr"]), row["status"]) == (trial.axes["width"], trial.axes["lr"], "done")


def test_the_section_says_the_same_as_the_flags(capsys, yaml, tmp_path):
    text = Path(yaml).read_text().replace("sweep: null", "sweep: {widths: '16..32', lrs: '2^-7,2^-5', seeds: 2}")
    (tmp_path / "section.yaml").write_text(text)
    sweep(capsys, "section.yaml", "--out", "one", "--plan")
    sweep(capsys, yaml, "--widths", "16..32", "--lrs", "2^-7,2^-5", "--seeds", "2", "--out", "two", "--plan")
    assert load_config("one") == load_config("two")
    sweep(capsys, "section.yaml", "--lrs", "1e-2,1e-3", "--out", "three", "--plan")
    assert load_config("three").sweep.lrs == [1e-3, 1e-2] and load_config("three").sweep.widths == [16, 32]


def test_lists_on_the_command_line_are_axes(capsys, yaml):
    planned(capsys, yaml, "optimizer.weight_decay=[0,0.1]", "optimizer.betas=[[0.9,0.95],[0.9,0.99]]", "ipu.layers_per_ipu=[2]")
    config = load_config("out")
    assert config.sweep.grid == {"optimizer.weight_decay": [0, 0.1], "optimizer.betas": [[0.9, 0.95], [0.9, 0.99]]}
    assert len(expand(config, config.sweep)) == 4 and config.ipu.layers_per_ipu == [2]


MISTAKES = [
    ("no axis has two values", []),
    ("stands twice", ["--lrs", "1,2", "--parametrizations", "mup,mup"]),
    ("rise", ["--lrs", "2^-4..2^-8"]),
    ("one batch size", ["batch.micro=[1,2]"]),
    ("--lrs", ["optimizer.lr=[1,2]"]),
    ("one of auto, sequential, local, batched, ray", ["--lrs", "1,2", "--executor", "slurm"]),
    ("greater than 0", ["--lrs", "0,1"]),
    ("width 33", ["--widths", "16,33"]),
    ("K/N", ["--lrs", "1,2", "--share", "2/2"]),
    ("has begun", ["--lrs", "1,2", "--retry"]),
    ("did you mean `optimizer.lr`", ["--lrs", "1,2", "lr=3"]),
    ("muP needs a base", ["--widths", "16,32", "mup.base_width=null"]),
    ("longer than the warm-up", ["--lrs", "1,2", "schedule.warmup=6"]),
    ("cannot be trained together", ["--lrs", "1,2", "--executor", "batched", "model.dropout=0.1"]),
    ("how it grows with width", ["--widths", "16,32", "model.ffn_width=64"]),
    ("no such file", ["--lrs", "1,2", "data.corpus=nowhere.txt"]),
    ("one global batch needs", ["--lrs", "1,2", "batch.micro=5000"]),
]


@pytest.mark.parametrize("words, flags", MISTAKES, ids=[words for words, _ in MISTAKES])
def test_mistakes_are_told_before_anything_is_written(capsys, yaml, words, flags):
    code, _, _, err = sweep(capsys, yaml, *flags, "--out", "out")
    assert code == 2 and words in err and not Path("out").exists()


def test_a_missing_ray_is_told_before_anything_is_written(capsys, yaml, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, _, err = sweep(capsys, yaml, "--lrs", "1,2", "--executor", "ray", "--out", "out")
    assert code == 3 and "Ray" in err and not Path("out").exists()


def test_train_reads_past_the_section_and_resume_refuses_the_directory(capsys, yaml):
    run = planned(capsys, yaml, "--lrs", "2^-7,2^-6")
    assert cli.main(["resume", str(run)]) == 2
    assert "made by `sweep`" in capsys.readouterr().err
