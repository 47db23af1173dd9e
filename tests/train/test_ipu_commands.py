"""The command line on emulated IPUs: the same run as on the CPU, changed devices, stopped, broken and started again."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any, Dict, List

import pytest
from safetensors.torch import load_file

from tests.train.helpers import timeless, write_yaml

pytestmark = pytest.mark.pod

IPU: Dict[str, Any] = {
    "device": "ipu-emulated",
    "model": {"dropout": 0.0},
    "batch": {"micro": 2, "accumulation": 5, "device_iterations": 2},
    "ipu": {"layers_per_ipu": [1, 1]},
    "train": {"steps": 8, "eval_every": 4, "eval_batches": 2, "save_every": 4, "log_every": 2},
}
ENGINE = "from ipu_lean.train.engines.poptorch_engine import PopTorchEngine\nold = PopTorchEngine.train_step\n"
SLOW = ENGINE + (
    "import time\ndef slow(self, batch):\n    time.sleep(0.1)\n    return old(self, batch)\nPopTorchEngine.train_step = slow\n"
)
FAILING = ENGINE + (
    "import ipu_lean.ipu.emulator as poptorch\nfailures = []\n"
    "def failing(self, batch):\n"
    "    if self.update == 6 and len(failures) < {times}:\n"
    "        failures.append(1)\n"
    "        def broken(*inputs):\n"
    "            error = poptorch.RecoverableError('link down'); error.recovery_action = 'LINK_RESET'; raise error\n"
    "        real, self.executor = self.executor, None\n"
    "        class Broken:\n"
    "            def __getattr__(self, name): return getattr(real, name)\n"
    "            def __call__(self, *inputs): broken()\n"
    "        self.executor = Broken()\n"
    "    return old(self, batch)\n"
    "PopTorchEngine.train_step = failing\n"
)


def weights(run: Path, step: int) -> Dict[str, Any]:
    return load_file(str(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors"))


@pytest.fixture(scope="module")
def runs(zygote: Any, tmp_path_factory: Any) -> Path:
    """A folder with the run `ipu`, and `cpu` from the same configuration."""
    folder = tmp_path_factory.mktemp("ipu")
    config = write_yaml(folder, **IPU)
    for name, override in (("ipu", []), ("cpu", ["device=cpu"])):
        ended = zygote.run(["train", config.name, *override, "--out", name, "--json"], cwd=folder)
        assert ended.code == 0, ended.err
        (folder / f"{name}.txt").write_text(ended.out)
    return folder


def test_the_emulated_run_is_the_cpu_run(runs: Path) -> None:
    ipu = timeless(runs / "ipu" / "metrics.jsonl")
    cpu = {(one["step"], one["split"]): one for one in timeless(runs / "cpu" / "metrics.jsonl")}
    assert [one["step"] for one in ipu if one["split"] == "train"] == [2, 4, 6, 8]
    for one in ipu:
        other = cpu[one["step"], one["split"]]
        assert abs(one["loss"] - other["loss"]) <= 2e-6 * other["loss"], one
        assert one["tokens"] == other["tokens"] and one.get("lr") == other.get("lr")
        assert one["split"] != "train" or one["grad_norm"] is None  # the device keeps it to itself
    mine, theirs = weights(runs / "ipu", 8), weights(runs / "cpu", 8)
    assert list(mine) == list(theirs)
    for name in mine:
        if mine[name].is_floating_point() and "key.linear.bias" not in name:
            assert float((mine[name] - theirs[name]).norm()) <= 1e-4 * float(theirs[name].norm()), name


def test_placement_and_options_are_kept_and_shown(runs: Path) -> None:
    table = (runs / "ipu" / "ipu_placement.txt").read_text()
    assert table in (runs / "ipu.txt").read_text() and "head" in table
    assert "train.gradient_accumulation = 5" in (runs / "ipu" / "ipu_options.txt").read_text()
    assert "compiling the training step for 2 IPUs" in (runs / "ipu.txt").read_text()
    assert not (runs / "cpu" / "ipu_options.txt").exists()


def test_evaluation_on_ipus_counts_the_same_tokens(zygote: Any, runs: Path) -> None:
    found: List[Any] = []
    for override in ([], ["device=cpu"]):
        ended = zygote.run(["eval", "ipu", *override, "--checkpoint", "last", "--json"], cwd=runs)
        assert ended.code == 0, ended.err
        found.append(ended.summary["metrics"]["valid"])
    assert found[0]["tokens"] == found[1]["tokens"]
    assert abs(found[0]["loss"] - found[1]["loss"]) <= 1e-6 * found[1]["loss"]


def test_generation_is_the_hosts(zygote: Any, runs: Path) -> None:
    texts = [
        zygote.run(["generate", name, "--tokens", "8", "--temperature", "0", "--checkpoint", "last"], cwd=runs).out
        for name in ("ipu", "cpu")
    ]
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize("first, second", [("ipu-emulated", "cpu"), ("cpu", "ipu-emulated"), ("ipu-emulated", "ipu-emulated")])
def test_a_run_goes_on_on_another_device(zygote: Any, runs: Path, tmp_path: Path, first: str, second: str) -> None:
    train = {**IPU["train"], "steps": 4}
    config = write_yaml(tmp_path, **{**IPU, "train": train, "schedule": {"steps": 8}})
    ended = zygote.run(["train", config, f"device={first}", "--out", tmp_path / "run"])
    assert ended.code == 0, ended.err
    ended = zygote.run(["resume", tmp_path / "run", f"device={second}", "train.steps=8"])
    assert ended.code == 0, ended.err
    mine, theirs = weights(tmp_path / "run", 8), weights(runs / "ipu", 8)
    for name in mine:
        if first == second:
            assert mine[name].equal(theirs[name]), name  # bit for bit
        elif mine[name].is_floating_point() and "key.linear.bias" not in name:
            assert float((mine[name] - theirs[name]).norm()) <= 1e-4 * float(theirs[name].norm()), name


def test_an_fp16_run_goes_on_in_fp32_elsewhere_and_back(zygote: Any, tmp_path: Path) -> None:
    train = {**IPU["train"], "steps": 4, "sample": {"tokens": 0}}
    config = write_yaml(
        tmp_path, **{**IPU, "train": train, "precision": "fp16-ipu", "ipu": {**IPU["ipu"], "emulate_precision": True}}
    )
    run = tmp_path / "run"
    assert zygote.run(["train", config, "--out", run]).code == 0
    refused = zygote.run(["resume", run, "precision=fp32", "train.steps=8"])
    assert refused.code == 2 and "cannot change" in refused.err
    for device, precision, steps in (("cpu", "fp32", 8), ("ipu-emulated", "fp16-ipu", 10)):
        ended = zygote.run(["resume", run, f"device={device}", f"precision={precision}", f"train.steps={steps}"])
        assert ended.code == 0, ended.err
    losses = [one["loss"] for one in timeless(run / "metrics.jsonl") if one["split"] == "train"]
    assert len(losses) >= 5 and losses[-1] < losses[0]


def test_an_interrupted_run_saves_and_goes_on(zygote: Any, tmp_path: Path) -> None:
    config = write_yaml(tmp_path, **{**IPU, "train": {**IPU["train"], "steps": 60}})
    ended = zygote.run(["train", config, "--out", tmp_path / "run"], prelude=SLOW, signals=[(0.3, signal.SIGINT)])
    assert ended.code == 130, ended.err
    step = int(re.search(r"stopped at step (\d+) of 60 and saved", ended.err).group(1))  # type: ignore[union-attr]
    assert step % 2 == 0 and weights(tmp_path / "run", step)


def test_a_recoverable_failure_starts_again_once(zygote: Any, runs: Path, tmp_path: Path) -> None:
    config = write_yaml(tmp_path, **IPU)
    ended = zygote.run(["train", config, "--out", tmp_path / "run"], prelude=FAILING.format(times=1))
    assert ended.code == 0, ended.err
    assert "LINK_RESET" in ended.err + ended.out and "going on from step-00000004" in ended.out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "ok"
    mine, theirs = weights(tmp_path / "run", 8), weights(runs / "ipu", 8)
    assert all(mine[name].equal(theirs[name]) for name in mine)


def test_a_second_failure_ends_the_run(zygote: Any, tmp_path: Path) -> None:
    config = write_yaml(tmp_path, **IPU)
    ended = zygote.run(["train", config, "--out", tmp_path / "run"], prelude=FAILING.format(times=9))
    assert ended.code == 1 and "LINK_RESET" in ended.err and "Traceback" not in ended.err, ended.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_a_device_that_is_gone_at_the_second_attempt_takes_no_checkpoint_along(zygote: Any, tmp_path: Path) -> None:
    gone = (
        "from ipu_lean.errors import EnvironmentProblem\nfrom ipu_lean.train import session\nmake = session.make_engine\n"
        "def none_left(*arguments):\n    if failures: raise EnvironmentProblem('no IPU is free')\n    return make(*arguments)\n"
        "session.make_engine = none_left\n"
    )
    ended = zygote.run(["train", write_yaml(tmp_path, **IPU), "--out", tmp_path / "run"], prelude=FAILING.format(times=1) + gone)
    assert ended.code == 3 and "no IPU is free" in ended.err, ended.err
    assert weights(tmp_path / "run", 4)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_under_poprun_a_failure_ends_the_run(zygote: Any, tmp_path: Path) -> None:
    config = write_yaml(tmp_path, **IPU)
    launched = "import os\nos.environ['POPDIST_NUM_TOTAL_REPLICAS'] = '1'\n"
    ended = zygote.run(["train", config, "--out", tmp_path / "run"], prelude=launched + FAILING.format(times=1))
    assert ended.code == 1 and "going on from" not in ended.out, ended.err


def test_a_real_poptorch_trains_from_the_command_line(zygote: Any, runs: Path, tmp_path: Path) -> None:
    """The emulator under PopTorch's name stands for the real one."""
    config = write_yaml(tmp_path, **{**IPU, "device": "ipu"})
    prelude = "import sys, ipu_lean.ipu.emulator\nsys.modules['poptorch'] = sys.modules['ipu_lean.ipu.emulator']\n"
    ended = zygote.run(["train", config, "--out", tmp_path / "run"], prelude=prelude)
    assert ended.code == 0, ended.err
    mine, theirs = weights(tmp_path / "run", 8), weights(runs / "ipu", 8)
    assert all(mine[name].equal(theirs[name]) for name in mine)


def test_a_loss_that_is_not_finite_stops_the_run(zygote: Any, tmp_path: Path) -> None:
    config = write_yaml(tmp_path, **{**IPU, "optimizer": {"kind": "sgd", "lr": 1e38}, "train": {**IPU["train"], "clip": None}})
    ended = zygote.run(["train", config, "--out", tmp_path / "run"])
    assert ended.code == 1 and "not saved" in ended.err and "Traceback" not in ended.err, ended.err


def test_mistakes_leave_nothing_behind(zygote: Any, tmp_path: Path) -> None:
    config = write_yaml(tmp_path, **IPU)
    for override, code, words in (
        ("batch.accumulation=4", 2, "2F-1 = 5"),
        ("ipu.layers_per_ipu=[2, 1]", 2, "placed are 3"),
        ("precision=bf16-mixed", 2, "no bf16"),
        ("device=ipu", 3, "ipu-emulated"),
    ):
        ended = zygote.run(["train", config, override, "--out", tmp_path / "run"])
        assert ended.code == code and words in ended.err and not (tmp_path / "run").exists(), ended.err
