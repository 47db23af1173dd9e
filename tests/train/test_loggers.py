"""Metrics on disk, cut back to a checkpoint, and services that are off are never touched."""

from __future__ import annotations

import builtins
import csv
import json
import sys
import types
from pathlib import Path
from typing import Any, Dict, List

import pytest

from ipu_lean.config import Config, make_config
from ipu_lean.errors import EnvironmentProblem
from ipu_lean.train.loggers import COLUMNS, MetricsLog, check_loggers, read_metrics
from ipu_lean.train.runs import RunDirectory

pytestmark = pytest.mark.pod


def config_with(**logging: Any) -> Config:
    return make_config(logging=logging, mup={"base_width": 64})


def record(step: int, split: str = "train", **values: Any) -> Dict[str, Any]:
    return {"step": step, "split": split, "loss": 1.0 / step, **values, "time": 100.0 + step}


def write(run: RunDirectory, steps: List[int], after: int = 0) -> None:
    log = MetricsLog(run, config_with(), after)
    for step in steps:
        log.write(record(step, lr=0.1, tokens_per_s=None))
    log.close()


def test_jsonl_and_csv_agree(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    write(run, [1, 2, 3])
    records = read_metrics(run.metrics)
    with open(run.csv, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3] == [one["step"] for one in records]
    assert tuple(rows[0]) == COLUMNS and float(rows[2]["loss"]) == records[2]["loss"] and rows[0]["tokens_per_s"] == ""


@pytest.mark.parametrize("tail", ["", '{"step": 9, "sp', '{"step": 9}\nrubbish\n{"step": 2, "split": "train"}\n', "\x00\x00"])
def test_resuming_forgets_what_came_after(tmp_path: Path, tail: str) -> None:
    run, straight = RunDirectory(tmp_path / "a"), RunDirectory(tmp_path / "b")
    for one in (run, straight):
        one.path.mkdir()
    write(straight, [1, 2, 3, 4])
    write(run, [1, 2, 3])
    with open(run.metrics, "a") as file:
        file.write(tail)
    write(run, [3, 4], after=2)
    assert run.metrics.read_text() == straight.metrics.read_text()
    assert run.csv.read_text() == straight.csv.read_text()


def test_infinities_are_null(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    log = MetricsLog(run, config_with(csv=False), 0)
    log.write(record(1, "valid", perplexity=float("inf")))
    log.close()
    assert json.loads(run.metrics.read_text())["perplexity"] is None and not run.csv.exists()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] in ("wandb", "tensorboard"):
            raise ImportError(f"No module named {name!r}")
        return original(name, *args, **kwargs)

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(EnvironmentProblem, match=r"`pip install wandb`"):
        check_loggers(config_with(wandb=True))
    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(EnvironmentProblem, match=r"`pip install tensorboard`"):
        check_loggers(config_with(tensorboard=True))
    check_loggers(config_with())


def test_wandb_is_contacted_only_when_asked_and_continues_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: List[Any] = []
    page = types.SimpleNamespace(
        id="page1", log=lambda values, step: calls.append(("log", values, step)), finish=lambda: calls.append(("finish",))
    )

    def init(**options: Any) -> Any:
        calls.append(("init", options["id"], options["resume"], options["project"]))
        return page

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    run = RunDirectory(tmp_path)
    write(run, [1])
    assert calls == []
    for step in (1, 2):
        log = MetricsLog(run, config_with(wandb=True, wandb_project="p"), step - 1)
        log.write(record(step))
        log.close()
    assert calls[0] == ("init", None, None, "p") and calls[3] == ("init", "page1", "allow", "p")
    assert calls[1] == ("log", {"train/loss": 1.0}, 1) and calls[2] == ("finish",)


def test_tensorboard_writes_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = MetricsLog(RunDirectory(tmp_path), config_with(tensorboard=True), 0)
    log.write(record(1))
    log.close()
    assert list((tmp_path / "tensorboard").glob("events*"))
