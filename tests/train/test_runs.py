"""Run directories: made once, locked, never overwritten."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from ipu_lean.errors import ConfigError, EnvironmentProblem, RunError
from ipu_lean.train.runs import RunDirectory, make_summary

pytestmark = pytest.mark.pod


def test_create_open_and_refuse(tmp_path: Path) -> None:
    run = RunDirectory.create(str(tmp_path / "deep" / "run"), "name", "seed: 1\n")
    assert run.config.read_text() == "seed: 1\n" and os.listdir(run.path) == ["config.yaml"]
    assert os.listdir(tmp_path / "deep") == ["run"], "nothing is left beside it"
    assert RunDirectory.open(str(run.path)).config == run.config
    with pytest.raises(ConfigError, match="exists and is not empty.*resume"):
        RunDirectory.create(str(run.path), "name", "")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        RunDirectory.create(str(tmp_path / "file"), "name", "")
    with pytest.raises(ConfigError, match="file is no folder.*cannot be made"):
        RunDirectory.check_free(str(tmp_path / "file" / "below" / "deeper"))
    with pytest.raises(ConfigError, match="cannot be made"):
        RunDirectory.create(str(tmp_path / ("x" * 300)), "name", "")
    (tmp_path / "empty").mkdir()
    assert RunDirectory.create(str(tmp_path / "empty"), "name", "a: 1\n").config.read_text() == "a: 1\n"


def test_a_place_that_may_not_be_written_is_the_machines_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as root every folder can be written
    for out in (str(tmp_path / "deep" / "run"), None):
        with pytest.raises(EnvironmentProblem, match="no permission to write"):
            RunDirectory.check_free(out)


def test_default_names_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [RunDirectory.create(None, "toy", "").path for _ in range(3)]
    assert len(set(paths)) == 3 and all(path.parent == tmp_path / "runs" and path.name.startswith("toy-") for path in paths)


def test_open_refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        RunDirectory.open(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="holds no config.yaml"):
        RunDirectory.open(str(tmp_path))


def test_hints_of_a_directory_that_is_taken(tmp_path: Path) -> None:
    run = RunDirectory.create(str(tmp_path / "my run"), "x", "seed: 0\n")
    with pytest.raises(ConfigError) as told:
        RunDirectory.check_free(str(run.path))
    assert f"ipu-lean resume '{run.path}'" in str(told.value)
    with pytest.raises(ConfigError, match="is a file"):
        RunDirectory.check_free(str(run.config))
    run.check_trained()
    run.write_summary({"command": "parity"})
    with pytest.raises(ConfigError, match="made by `parity`"):
        run.check_trained()
    with pytest.raises(ConfigError) as told:
        RunDirectory.check_free(str(run.path))
    assert "resume" not in str(told.value)  # nothing was trained there


def test_a_trace_is_no_training(tmp_path: Path) -> None:
    """`parity record` keeps a config.yaml as well, and no summary."""
    run = RunDirectory.create(str(tmp_path / "trace"), "x", "seed: 0\n")
    (run.path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError) as told:
        RunDirectory.check_free(str(run.path))
    assert "resume" not in str(told.value)
    with pytest.raises(ConfigError, match="made by `parity record`"):
        run.check_trained()


@pytest.mark.parametrize(("section", "command"), [("study: {variants: {a: {}}}", "study"), ("sweep: {lrs: [0.1, 0.2]}", "sweep")])
def test_a_killed_sweep_and_a_killed_study_are_told_apart(tmp_path: Path, section: str, command: str) -> None:
    """Both keep trials, and neither has left a summary."""
    run = RunDirectory.create(str(tmp_path / "run"), "x", f"mup: {{base_width: 64}}\n{section}\n")
    (run.path / "trials").mkdir()
    with pytest.raises(ConfigError) as told:
        RunDirectory.check_free(str(run.path))
    assert f"ipu-lean {command} {run.path}" in str(told.value)
    with pytest.raises(ConfigError, match=f"made by `{command}`"):
        run.check_trained()


def test_lock_keeps_another_process_out(tmp_path: Path) -> None:
    one, other = RunDirectory(tmp_path), RunDirectory(tmp_path)
    one.lock()
    one.lock()
    with pytest.raises(RunError, match="another process is training"):
        other.lock()
    one.unlock()
    other.lock()
    other.unlock()


def test_a_summary_holds_no_number_that_json_has_not() -> None:
    metrics = {"valid": {"loss": 800.0, "perplexity": math.inf}, "rows": [math.nan, 1.5, -math.inf], "tokens": 3}
    summary = make_summary("eval", device="cpu", config_hash="x", metrics=metrics)
    assert summary["metrics"] == {"valid": {"loss": 800.0, "perplexity": None}, "rows": [None, 1.5, None], "tokens": 3}
    json.dumps(summary, allow_nan=False)


def test_summary_schema() -> None:
    summary = make_summary("train", device="cpu", config_hash="abc", steps=3, tokens=12, seconds=1.23456, metrics={"loss": 1.0})
    names = "schema command status verdict exit_code device config_hash steps tokens seconds metrics artifacts"
    assert " ".join(summary) == names
    assert summary["status"] == "ok" and summary["exit_code"] == 0 and summary["seconds"] == 1.235
    assert make_summary("train", device="cpu", config_hash="", status="failed", exit_code=1, error="why")["error"] == "why"
