"""Sweeps and studies in a directory that cannot be written: what they hold is shown, and nothing is begun."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipu_lean.config import load_config
from ipu_lean.sweep.grid import expand
from ipu_lean.sweep.results import Store
from tests.sweep.commandline import WIDE, moving, planned, sweep
from tests.sweep.helpers import fill
from tests.sweep.readonly import unwritable

pytestmark = pytest.mark.pod


def contents(folder):
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_finished_sweep_is_shown(capsys, yaml):
    run = planned(capsys, yaml, *WIDE[:-2])
    fill(run, moving(mup=-1.0))
    code, judged, out, _ = sweep(capsys, run)
    before = contents(run)
    with unwritable(run):
        for flags in ([], ["--workers", "3"], ["--plan"]):
            again, summary, shown, err = sweep(capsys, run, *flags)
            told = [line for line in err.splitlines() if "nothing could be written" in line]
            if flags == ["--plan"]:
                assert again == 0 and told == []
                continue
            assert (again, summary["verdict"]) == (code, "fail") == (4, judged["verdict"])
            assert shown.splitlines()[:-1] == out.splitlines()[:-1] and summary["artifacts"] == judged["artifacts"]
            assert len(told) == 1 and str(run) in told[0] and "(Permission denied)" in told[0]
    assert contents(run) == before


def test_a_sweep_that_was_never_judged_is_judged(capsys, yaml):
    """A copy of trials on a machine without the text, the device, and a place to write."""
    run = planned(capsys, yaml, *WIDE[:-2])
    fill(run, moving())
    Path("text.txt").unlink()
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("executor: auto", "executor: ray"))
    with unwritable(run):
        code, summary, out, err = sweep(capsys, run, "--strict")
    assert (code, summary["verdict"]) == (0, "pass") and "lr-transfer: pass" in out and "nothing could be written" in err
    assert list(summary["artifacts"]) == ["run"] and not (run / "summary.json").exists()


def test_trials_that_could_not_be_kept_are_not_begun(capsys, yaml, monkeypatch):
    run = planned(capsys, yaml, *WIDE[:-2])
    fill(run, moving(), skip=lambda trial: trial.axes["seed"] == 1)
    monkeypatch.setattr("ipu_lean.sweep.commands._execute", lambda *_: pytest.fail("trained"))
    before = contents(run)
    with unwritable(run):
        for flags in ([], ["--share", "1/2"], ["--lrs", "2^-3"], ["--lrs", "2^-3", "--plan"]):
            code, _, _, err = sweep(capsys, run, *flags)
            assert code == 3 and "no permission to write (Permission denied)" in err and str(run) in err
        with pytest.raises(PermissionError):
            Store(run).check_writable()
    assert contents(run) == before and len(expand(load_config(run), load_config(run).sweep)) == 42
