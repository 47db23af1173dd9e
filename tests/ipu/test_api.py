"""Which module stands for PopTorch."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import ipu_lean.ipu
from ipu_lean.errors import EnvironmentProblem
from ipu_lean.ipu import load_poptorch

pytestmark = pytest.mark.pod


def test_the_emulator_needs_nothing() -> None:
    assert load_poptorch("ipu-emulated").__name__ == "ipu_lean.ipu.emulator"


def test_a_real_poptorch_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("poptorch")
    monkeypatch.setitem(sys.modules, "poptorch", fake)
    assert load_poptorch("ipu") is fake


def test_a_missing_poptorch_names_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "poptorch", None)  # import fails
    with pytest.raises(EnvironmentProblem, match="ipu-emulated") as caught:
        load_poptorch("ipu")
    assert caught.value.exit_code == 3


def test_a_poptorch_that_refuses_this_torch_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    (tmp_path / "poptorch.py").write_text("raise AssertionError('PopTorch needs torch 2.0.1')\n")  # type: ignore[operator]
    monkeypatch.delitem(sys.modules, "poptorch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EnvironmentProblem, match="needs torch 2.0.1"):
        load_poptorch("ipu")


def test_public_names_are_there_and_others_are_not() -> None:
    for name in ipu_lean.ipu.__all__:
        assert getattr(ipu_lean.ipu, name) is not None
    with pytest.raises(AttributeError, match="no_such"):
        ipu_lean.ipu.no_such  # noqa: B018


def test_the_contract_loads_neither_torch_nor_the_application() -> None:
    code = "import sys, ipu_lean.ipu.contract; print([n for n in ('torch', 'pydantic', 'poptorch') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
