"""`compile`: the step alone, on the emulator; nothing runs and nothing is trained."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Dict, Tuple

import pytest

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.cli import main
from ipu_lean.config import load
from ipu_lean.train.compile import run_compile

pytestmark = pytest.mark.pod
TINY = str(Path(__file__).resolve().parents[2] / "configs" / "tiny_ipu.yaml")


def call(capsys: Any, *words: str) -> Tuple[int, Dict[str, Any], str]:
    code = main([*words, "--json"])
    out = capsys.readouterr().out
    return code, json.loads(out.splitlines()[-1]), out


@pytest.mark.parametrize("offline", [False, True])
def test_it_compiles_and_runs_nothing(capsys: Any, monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    monkeypatch.setattr(poptorch.PoplarExecutor, "__call__", None)
    code, summary, text = call(capsys, "compile", TINY, *(["--offline"] if offline else []))
    assert (code, summary["command"], summary["metrics"]["ipus"], summary["metrics"]["stages"]) == (0, "compile", 2, 3)
    assert "compiled for 2 IPUs" in text and "keeps no program" in text
    assert summary["metrics"]["target"] == ("ipu2" if offline else None)


def test_the_ipus_are_free_afterwards() -> None:
    said = []
    for _ in range(2):
        run_compile(load(TINY), say=said.append)
    assert said[:1] == ["compiling the training step for 2 IPUs"]


def test_a_step_that_poptorch_refuses(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from ipu_lean.nn import FeedForward

    true = FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: torch.lerp(true(self, x), x, 0.5))
    code, summary, _ = call(capsys, "compile", TINY)
    assert code == 1 and "aten::lerp" in summary["error"]
    monkeypatch.undo()
    assert call(capsys, "compile", TINY)[0] == 0  # the failed one let go of the IPUs


def test_only_for_ipus(capsys: Any) -> None:
    code, summary, _ = call(capsys, "compile", TINY, "device=cpu")
    assert code == 2 and "add `device=ipu`" in summary["error"].lower()


@pytest.mark.skipif(importlib.util.find_spec("poptorch") is not None, reason="PopTorch is here")
def test_without_poptorch(capsys: Any) -> None:
    code, summary, _ = call(capsys, "compile", TINY, "device=ipu")
    assert code == 3 and "PopTorch" in summary["error"]
