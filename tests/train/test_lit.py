"""Launching: Lightning's own processes, torchrun, and what is said before any of them starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest

from ipu_lean._compat import TORCH
from ipu_lean.config import make_config
from ipu_lean.errors import ConfigError
from tests.train.helpers import timeless, write_yaml

pytestmark = pytest.mark.pod
ROOT = Path(__file__).resolve().parents[2]
NO_DROPOUT = {"model": {"dropout": 0.0}, "batch": {"micro": 2, "accumulation": 1, "replicas": 2}}


def launch(words: List[Any], cwd: Path, runner: List[str] = ()) -> Any:
    """A true process, as a person starts it."""
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")}
    environment.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    command = [sys.executable, *runner, "-m", "ipu_lean", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=110)


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.fixture(scope="module")
def alone(zygote: Any, tmp_path_factory: Any) -> Any:
    """(folder, configuration, run of one process)."""
    folder = tmp_path_factory.mktemp("alone")
    config = write_yaml(folder, **NO_DROPOUT)
    ended = zygote.run(["train", config, "--out", folder / "run"])
    assert ended.code == 0, ended.err
    return folder, config, folder / "run"


def weights_of(run: Path, step: int = 12) -> Dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(str(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors"))


def assert_same_run(run: Path, other: Path) -> None:
    mine, theirs = weights_of(run), weights_of(other)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        if value.is_floating_point() and not name.endswith("key.linear.bias"):
            assert float((value - mine[name]).norm() / value.norm().clamp(min=1e-12)) < 1e-5, name
    one, two = timeless(run / "metrics.jsonl"), timeless(other / "metrics.jsonl")
    assert [(record["step"], record["split"]) for record in one] == [(record["step"], record["split"]) for record in two]
    for a, b in zip(one, two):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5) and a["tokens"] == b["tokens"]


def test_lightning_starts_two_processes_and_the_checkpoint_fits_one(zygote: Any, alone: Any, tmp_path: Path) -> None:
    _, config, reference = alone
    run = tmp_path / "run"
    ended = launch(["train", config, "train.processes=2", "--out", run, "--json"], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "2 processes (ddp)" in ended.stdout and ended.stdout.count("step 12/12") == 1, "only the first process speaks"
    assert json.loads(ended.stdout.strip().splitlines()[-1])["tokens"] == 12 * 4 * 16
    # A second process may end, its work done, while a thread of gloo still runs; C++ then says so in a line of its own.
    said = [line for line in ended.stderr.splitlines() if line != "terminate called without an active exception"]
    assert not said, ended.stderr
    assert_same_run(run, reference)
    # Back to step 9 as if killed there; one process finishes what two began.
    (run / "checkpoints" / "step-00000012").rename(tmp_path / "later")
    resumed = zygote.run(["resume", run, "train.processes=1"])
    assert resumed.code == 0, resumed.err
    assert_same_run(run, reference)


def test_torchrun_starts_them_too(alone: Any, tmp_path: Path) -> None:
    _, config, reference = alone
    run = tmp_path / "run"
    ended = launch(["train", config, "--out", run], tmp_path, TORCHRUN)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("step 12/12") == 1
    assert_same_run(run, reference)


def test_fsdp_or_a_clear_refusal(alone: Any, tmp_path: Path) -> None:
    _, config, reference = alone
    ended = launch(["train", config, "train.processes=2", "train.strategy=fsdp", "--out", tmp_path / "run"], tmp_path)
    if TORCH >= (2, 6):
        assert ended.returncode == 0, ended.stderr
        assert_same_run(tmp_path / "run", reference)
    elif ended.returncode != 0:
        assert ended.returncode == 3 and "cannot shard on CPU" in ended.stderr and "Traceback" not in ended.stderr


def test_a_mistake_in_two_processes_is_said_once(alone: Any, tmp_path: Path) -> None:
    _, config, _ = alone
    prelude = "optimizer.lr=1e38"
    ended = launch(["train", config, prelude, "train.clip=null", "train.processes=2", "--out", tmp_path / "run"], tmp_path)
    assert ended.returncode == 1 and ended.stderr.count("ipu-lean: error:") == 1 and "Traceback" not in ended.stderr, ended.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_planned_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from ipu_lean.train import lit

    def config_of(**train: Any) -> Any:
        return make_config(train=train, batch={"replicas": 4}, mup={"base_width": 64})

    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert lit.planned_size(config_of(processes=2)) == 2 and lit.launched_rank() == 0
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "3")
    assert lit.planned_size(config_of()) == 4 and lit.planned_size(config_of(processes=2)) == 4 and lit.launched_rank() == 3
    with pytest.raises(ConfigError, match="torchrun started 2 processes"):
        lit.planned_size(config_of(processes=4))
    with pytest.raises(ConfigError, match="`single` is one process, and 4 were started"):
        lit.planned_size(config_of(strategy="single"))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="3 processes share them evenly"):
        lit.planned_size(config_of())


def test_only_lit_needs_lightning() -> None:
    code = (
        "import sys\nsys.modules['pytorch_lightning'] = None\nsys.modules['lightning'] = None\nimport ipu_lean.train\n"
        "from ipu_lean.errors import EnvironmentProblem\n"
        "try:\n    import ipu_lean.train.lit\nexcept EnvironmentProblem as error:\n    print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0 and "training needs Lightning" in ended.stdout, ended.stderr
