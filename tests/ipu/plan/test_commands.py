"""The command: table, exit codes, the directory, and how soon the answer is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Tuple

import pytest

from ipu_lean.cli import main
from ipu_lean.config import load_config

pytestmark = pytest.mark.pod
ROOT = Path(__file__).parents[3]
SMALL = str(ROOT / "configs" / "gpt2_small_pod16.yaml")


def plan(capsys: Any, *arguments: str) -> Tuple[int, str, Any, str]:
    """(exit code, table, summary, stderr)."""
    code = main(["plan", *arguments, "--json"])
    captured = capsys.readouterr()
    *table, last = captured.out.splitlines()
    return code, "\n".join(table), json.loads(last), captured.err


def test_a_plan_that_fits(capsys: Any) -> None:
    code, table, summary, error = plan(capsys, SMALL)
    assert (code, summary["exit_code"], summary["verdict"], error) == (0, 0, "fits", "")
    metrics = summary["metrics"]
    assert (metrics["forward_stages"], metrics["minimum_accumulation"], metrics["global_batch"]) == (5, 9, 512)
    assert [row["verdict"] for row in metrics["ipus"]] == ["fits"] * 4 and metrics["first_lever"] is None
    assert [row["stash_depth"] for row in metrics["stages"]] == [9, 7, 5, 3, 1]
    assert "accumulation >= 2F-1 = 9 (it is 128); bubble 5.9 %" in table
    assert "1 micro x 128 accumulation x 4 replicas = 512 rows; 16 IPUs in all" in table
    assert table.splitlines()[-1] == "verdict: fits" and "lever" not in table


def test_the_sums_of_the_table_are_those_of_the_numbers(capsys: Any) -> None:
    _, table, summary, _ = plan(capsys, SMALL)
    for row in summary["metrics"]["ipus"]:
        before = sum(row["bytes"].values()) - row["bytes"]["temporaries"]
        assert row["before"] == pytest.approx(before / summary["metrics"]["memory"])
        assert f"{before / 2**20:.1f}" in table and f"{100 * row['after']:.1f}" in table
    total = sum(row["parameters"] for row in summary["metrics"]["ipus"])
    assert total == summary["metrics"]["parameters"] == sum(row["parameters"] for row in summary["metrics"]["stages"])


def test_a_plan_that_does_not_fit_exits_with_4_and_names_the_first_lever(capsys: Any) -> None:
    code, table, summary, error = plan(capsys, SMALL, "batch.micro=8", "ipu.matmul_proportion=0.4")
    assert (code, summary["verdict"], summary["status"]) == (4, "no", "ok")
    assert summary["metrics"]["first_lever"]["change"] == "batch.micro: 4, batch.accumulation: 256"
    assert "First lever: smaller micro-batches (batch.micro: 4, batch.accumulation: 256)" in error
    assert "first lever: smaller micro-batches" in table and "then: " in table
    assert summary["metrics"]["levers"][-1]["verdict"] == "fits"


def test_a_pod_sets_the_replicas(capsys: Any) -> None:
    code, table, summary, _ = plan(capsys, SMALL, "--pod", "64")
    assert code == 0 and summary["metrics"]["replicas"] == 16 and summary["metrics"]["ipus_in_all"] == 64
    assert "a POD64 has room for 16 replicas (batch.replicas is 4)" in table
    assert main(["plan", SMALL, "--pod", "3"]) == 2
    assert "4, 16, 64, 128 or 256" in capsys.readouterr().err


def test_a_configuration_for_another_device_is_planned_as_if_for_an_ipu(capsys: Any) -> None:
    code, table, summary, _ = plan(capsys, str(ROOT / "configs" / "lean_gpt_medium.yaml"))
    assert code == 4 and summary["device"] == "gpu"
    assert "the device is gpu" in table and "an IPU has no bf16-mixed" in table


def test_too_little_accumulation_is_said(capsys: Any) -> None:
    text = "{model: {width: 64, depth: 4}, mup: {base_width: 64}, ipu: {layers_per_ipu: [0, 4]}}"
    code, table, _, _ = plan(capsys, text)
    assert code == 0 and "2F-1 = 5 (it is 1, too few: `check` would refuse); bubble 44.4 % at 5" in table


def test_what_is_kept(capsys: Any, tmp_path: Path) -> None:
    out = tmp_path / "kept"
    code, table, summary, _ = plan(capsys, SMALL, "--out", str(out))
    assert code == 0 and {path.name for path in out.iterdir()} == {"config.yaml", "plan.txt", "plan.png", "summary.json"}
    assert json.loads((out / "summary.json").read_text()) == summary
    assert (out / "plan.txt").read_text() == table + "\n" and (out / "plan.png").read_bytes()[:4] == b"\x89PNG"
    assert load_config(str(out)) == load_config(SMALL)
    assert main(["plan", SMALL, "--out", str(out)]) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("at", ["plot_plan", "os.replace"])
def test_a_plan_that_is_interrupted_while_it_writes_leaves_nothing(
    capsys: Any, tmp_path: Path, monkeypatch: Any, there: bool, at: str
) -> None:
    """In a directory that was there before, too: that one stays, empty. The same command can be given again."""
    out = tmp_path / "kept"
    if there:
        out.mkdir()
    calls = []

    def stop(*arguments: Any, **_: Any) -> None:
        calls.append(arguments)
        if at == "os.replace" and len(calls) < 3 and there:
            return replace(*arguments)
        raise KeyboardInterrupt

    replace = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(f"ipu_lean.ipu.plan.commands.{at}", stop)
        assert main(["plan", SMALL, "--out", str(out)]) == 130
    assert calls and list(tmp_path.iterdir()) == ([out] if there else []) and (not there or not list(out.iterdir()))
    assert main(["plan", SMALL, "--out", str(out)]) == 0 and len(list(out.iterdir())) == 4


def test_a_refusal_is_kept_too(capsys: Any, tmp_path: Path) -> None:
    out = tmp_path / "kept"
    assert plan(capsys, SMALL, "batch.micro=16", "--out", str(out))[0] == 4
    assert json.loads((out / "summary.json").read_text())["verdict"] == "no"


def test_the_answer_needs_no_torch_and_no_numpy_and_comes_at_once() -> None:
    """CPU time of a fresh process, the start of Python included."""
    code = f"import sys\nfrom ipu_lean.cli import main\nassert main(['plan', {SMALL!r}]) == 0\n" \
           "assert not {'torch', 'numpy', 'matplotlib', 'pytorch_lightning'} & set(sys.modules)\n" \
           "import time\nprint(time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < 1.0


@pytest.mark.parametrize(
    "overrides, reason",
    [
        (["ipu.layers_per_ipu=[2, 10, -1]", "batch.accumulation=5"], "IPU 2 would hold nothing"),
        (["ipu.layers_per_ipu=[6, 6]", "ipu.head_ipu=1", "batch.accumulation=5"], "a weight cannot be on two IPUs"),
        (["ipu.embedding_ipu=9", "ipu.head_ipu=9"], "IPU 1 would hold nothing"),
    ],
)
def test_a_placement_that_no_ipu_takes_is_refused_for_a_file_of_another_device(
    capsys: Any, tmp_path: Path, overrides: Any, reason: str
) -> None:
    file = tmp_path / "cpu.yaml"
    file.write_text("model: {width: 64, depth: 12, heads: 4, seq: 64}\nmup: {base_width: 64}\n")
    assert main(["plan", str(file), *overrides]) == 2
    assert reason in capsys.readouterr().err
