"""The command line: exit codes, what is printed and what is kept."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from torch import nn

from ipu_lean.cli import main
from ipu_lean.config import load
from ipu_lean.errors import VerdictFailed
from ipu_lean.parity.commands import run_parity

from .helpers import sections

pytestmark = pytest.mark.pod


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: Any) -> Path:
    """A configuration on disk."""
    folder = tmp_path_factory.mktemp("commands")
    path = folder / "run.yaml"
    path.write_text(json.dumps(sections(folder, name="tiny")), encoding="utf-8")
    return path


def call(capsys: Any, *words: Any) -> Tuple[int, Dict[str, Any], str, str]:
    """(exit code, the JSON object, stdout, stderr)."""
    code = main([*map(str, words), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]), out, err


def test_parity(capsys: Any, yaml: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, summary, text, _ = call(capsys, "parity", yaml, "--steps", 2, "--out", out)
    assert (code, summary["verdict"], summary["command"], summary["steps"]) == (0, "pass", "parity", 2)
    assert "verdict: pass" in text and "reference: cpu" in text and "candidate: ipu-emulated" in text
    kept = json.loads((out / "summary.json").read_text())
    assert kept == summary and "table" not in kept
    assert {path.name for path in out.iterdir()} == {"config.yaml", "parity.json", "parity.txt", "parity.png", "summary.json"}
    assert (out / "parity.png").read_bytes()[:4] == b"\x89PNG"
    report = json.loads((out / "parity.json").read_text())
    assert {row["kind"] for row in report["rows"]} == {"activation", "gradient", "loss", "weight"}
    assert set(summary["metrics"]["worst"]) == {"activation", "gradient", "loss", "weight"}


def test_a_failed_verdict(capsys: Any, yaml: Path, tmp_path: Path) -> None:
    code, summary, text, err = call(
        capsys, "parity", yaml, "--steps", 2, "--out", tmp_path / "run", "--tolerance=loss=1e-9", "--tolerance=gradient=1e-9"
    )
    assert (code, summary["exit_code"], summary["verdict"]) == (4, 4, "fail")
    assert "cpu and ipu-emulated do not agree: the gradient `" in err and "verdict: fail" in text
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["verdict"] == "fail"


def test_inconclusive_is_a_warning_and_fails_when_strict(capsys: Any, yaml: Path, tmp_path: Path) -> None:
    words = ("parity", yaml, "--steps", 2, "--as-initialised", "--out")
    code, summary, _, err = call(capsys, *words, tmp_path / "one")
    assert (code, summary["verdict"]) == (0, "inconclusive") and "warning: inconclusive" in err
    code, summary, _, _ = call(capsys, *words, tmp_path / "two", "--strict")
    assert (code, summary["verdict"], summary["exit_code"]) == (4, "inconclusive", 4)


def test_two_machines(capsys: Any, yaml: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    code, summary, _, _ = call(capsys, "parity", "record", yaml, "--device", "cpu", "--steps", 2, "--out", one)
    assert (code, summary["command"], summary["verdict"]) == (0, "parity record", None)
    # Another seed would give other weights; --start takes the first trace's.
    emulated = ("seed=9", "--device", "ipu-emulated")
    code, summary, _, _ = call(capsys, "parity", "record", yaml, *emulated, "--start", one, "--out", two)
    assert code == 0 and len(summary["metrics"]["losses"]) == 2
    code, summary, _, _ = call(capsys, "parity", "compare", one, two)
    assert (code, summary["verdict"], summary["command"]) == (0, "pass", "parity compare")
    assert (two / "parity.json").exists()
    tight = ("--tolerance", "gradient=1e-12")
    code, summary, _, _ = call(capsys, "parity", "compare", one, two, *tight, "--out", tmp_path / "report")
    assert code == 4 and (tmp_path / "report" / "parity.png").exists()
    three = tmp_path / "three"
    assert call(capsys, "parity", "record", yaml, "seed=9", "--steps", 2, "--out", three)[0] == 0
    code, summary, _, _ = call(capsys, "parity", "compare", one, three)
    assert code == 2 and "same weights and batches" in summary["error"]


@pytest.mark.parametrize(("words", "says"), [
    (["parity", "{yaml}", "--steps", "3"], "multiple"),
    (["parity", "{yaml}", "--steps", "0"], "multiple"),
    (["parity", "{yaml}", "--out", "{full}"], "not empty"),
    (["parity", "{yaml}", "--tolerance", "speed=1"], "the tolerances are"),
    (["parity", "{yaml}", "--tolerance", "loss"], "name=number"),
    (["parity", "{yaml}", "--tolerance", "loss=-1"], "greater than 0"),
    (["parity", "{yaml}", "--candidate", "tpu"], "tpu"),
    (["parity", "{yaml}", "model.dropout=0.1"], "model.dropout=0"),
    (["parity", "{yaml}", "precision=bf16-mixed"], "no bf16"),
    (["parity", "{yaml}", "batch.accumulation=4"], "2F-1 = 5"),
    (["parity", "record", "{yaml}", "--out", "{full}"], "not empty"),
    (["parity", "record", "{yaml}"], "--out"),
    (["parity", "record", "{yaml}", "--out", "{new}", "--start", "{full}"], "holds no whole trace"),
    (["parity", "compare", "{full}", "{full}"], "holds no whole trace"),
    (["parity", "compare", "{full}"], "DIR2"),
])
def test_mistakes(capsys: Any, yaml: Path, tmp_path: Path, words: List[str], says: str) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "something").write_text("kept")
    code, summary, _, _ = call(capsys, *[word.format(yaml=yaml, full=full, new=tmp_path / "new") for word in words])
    assert code == 2 and says in summary["error"]
    assert not (tmp_path / "new").exists() and (full / "something").read_text() == "kept"


@pytest.mark.skipif(importlib.util.find_spec("poptorch") is not None, reason="PopTorch is here")
def test_a_missing_device(capsys: Any, yaml: Path, tmp_path: Path) -> None:
    code, summary, _, _ = call(capsys, "parity", yaml, "--candidate", "ipu", "--out", tmp_path / "run")
    assert code == 3 and "PopTorch" in summary["error"] and not (tmp_path / "run").exists()


def test_from_python(yaml: Path, tmp_path: Path) -> None:
    def edit(model: nn.Module) -> None:
        with torch.no_grad():
            model.norm.weight.mul_(1.01)

    with pytest.raises(VerdictFailed) as error:
        run_parity(load(yaml), "cpu", "ipu-emulated", 2, str(tmp_path / "run"), edit=edit)
    assert "activation `norm:LayerNorm` differs first" in str(error.value) and error.value.summary["verdict"] == "fail"
