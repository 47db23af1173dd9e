"""The configuration of the large run: it loads, differs in what it says, and warns where the sweep was not sure."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipu_lean import cli
from ipu_lean.config import dump_config, load_config
from ipu_lean.config.fields import leaves
from ipu_lean.sweep.grid import expand
from ipu_lean.sweep.results import Store
from ipu_lean.sweep.trial import failed_result
from ipu_lean.train.banner import flat
from tests.sweep.helpers import fill, tiny

pytestmark = pytest.mark.pod


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """A function that plans a sweep with the given flags and fills it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(dump_config(tiny(tmp_path)))

    def make(*flags, mup=0.0, standard=-1.0, **options):
        assert cli.main(["sweep", "tiny.yaml", *flags, "--out", "out", "--plan"]) == 0
        fill(tmp_path / "out", lambda name: standard if name == "standard" else mup, **options)
        capsys.readouterr()
        return tmp_path / "out"

    return make


WIDE = ("--widths", "16..64", "--lrs", "2^-11..2^-5", "--seeds", "2", "--parametrizations", "mup,standard")


def apply(capsys, *arguments):
    code = cli.main(["sweep", "apply", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_large_run_loads_and_differs_in_what_was_chosen(run, capsys, tmp_path):
    directory = run(*WIDE)
    code, text, err = apply(capsys, directory, "--width", "128")
    assert code == 0 and err == ""
    (tmp_path / "big.yaml").write_text(text)
    large, small = load_config("big.yaml"), load_config(directory)
    differing = {key for key, value in flat(large).items() if value != flat(small)[key]}
    assert differing == {"name", "model.width", "optimizer.lr", "sweep"}
    assert large.model.width == 128 and large.optimizer.lr == pytest.approx(2**-7.2, rel=0.03)
    assert "Verdict lr-transfer: pass" in text and "Beware" not in text
    assert "chosen by the sweep (vertex of the parabola, to three digits)" in text
    assert any(".".join(path) == "optimizer.lr" for path, _ in leaves())
    assert all(len(line) < 130 for line in text.splitlines() if line.startswith("#"))


def test_the_rate_is_the_grids_own_or_a_vertex_and_says_which(run, capsys, tmp_path):
    directory = run("--widths", "16..64", "--lrs", "0.00123456,0.0025,0.003456789", "--seeds", "2")  # no vertex
    _, text, _ = apply(capsys, directory)
    (tmp_path / "big.yaml").write_text(text)
    grid = load_config(directory).sweep.lrs
    large = load_config("big.yaml")
    assert large.optimizer.lr == grid[-1] and float(f"{grid[-1]:.3g}") != grid[-1]
    assert repr(grid[-1]) in text.split("optimizer.lr ")[1] and "chosen by the sweep (a rate of its grid)" in text
    assert large.model.width == 64  # the largest that was swept, without --width


def test_the_best_cell_of_a_grid_is_taken_over(run, capsys, tmp_path):
    directory = run(*WIDE[:-2], "optimizer.weight_decay=[0,0.1,0.2]")
    _, text, _ = apply(capsys, directory, "--width", "128")
    (tmp_path / "big.yaml").write_text(text)
    assert load_config("big.yaml").optimizer.weight_decay == 0.1  # which is the default, and so goes without saying
    assert "optimizer.weight_decay 0.1" in text


def test_an_axis_of_the_whole_configuration_is_taken_over(run, capsys, tmp_path):
    """A key outside of all sections."""
    directory = run("--lrs", "2^-9..2^-5", "--seeds", "2", "precision=[fp32,bf16-mixed]", better="bf16-mixed")
    _, text, _ = apply(capsys, directory)
    (tmp_path / "big.yaml").write_text(text)
    assert load_config("big.yaml").precision == "bf16-mixed"
    assert "best value of the grid" in text


def test_a_transfer_that_failed_is_not_applied_silently(run, capsys):
    directory = run(*WIDE, mup=-1.0)
    code, text, err = apply(capsys, directory, "--width", "128")
    assert code == 4 and text == "" and "does not transfer" in err and "--anyway" in err
    code, text, err = apply(capsys, directory, "--width", "128", "--anyway")
    assert code == 0 and "Beware" in text and "fail" in err


def test_doubts_are_in_the_file_and_on_the_terminal(run, capsys):
    directory = run("--lrs", "2^-10..2^-8", "--seeds", "2", skip=lambda trial: trial.axes["seed"] == 1)
    code, text, err = apply(capsys, directory, "--width", "64", "--depth", "4")
    assert code == 0
    for words in ("highest learning rate", "not tested", "3 of 6 trials of the sweep have not run", "depth was not swept"):
        assert words in " ".join(text.replace("\n#  ", "").split()), words
    assert err.count("warning: Beware") >= 4


def test_what_may_change_is_named_and_what_may_not_is_refused(run, capsys, tmp_path):
    directory = run(*WIDE)
    code, text, _ = apply(capsys, directory, "--width", "64", "train.steps=500", "batch.micro=8")
    assert code == 0 and "Not as in the sweep: batch.micro (2 there), train.steps (6 there)" in " ".join(text.split())
    (tmp_path / "big.yaml").write_text(text)
    assert load_config("big.yaml").train.steps == 500
    for override in ("model.bias=false", "optimizer.weight_decay=0", "mup.base_width=32", "model.width=32"):
        code, text, err = apply(capsys, directory, "--width", "64", override)
        assert code == 2 and text == "" and override.split("=")[0] in err


def test_mistakes(run, capsys, tmp_path):
    directory = run(*WIDE, skip=lambda trial: True)
    assert apply(capsys, directory, "--width", "64")[0] == 1
    code, _, err = apply(capsys, tmp_path, "--width", "64")
    assert code == 2 and "run directory" in err
    fill(Path(directory), lambda name: 0.0 if name == "mup" else -1.0)
    code, _, err = apply(capsys, directory, "--width", "33")
    assert code == 2 and "model" in err


def test_only_the_parametrisation_that_decides_is_chosen_from(run, capsys):
    """Interrupted after the control: its rate is not muP's."""
    flags = ["--widths", "16,32", "--lrs", "2^-9..2^-6", "--parametrizations", "standard,mup"]
    directory = run(*flags, skip=lambda trial: trial.axes["parametrization"] == "mup")
    code, text, err = apply(capsys, directory)
    assert code == 1 and text == "" and "no trial under mup has come to its end" in err


def test_the_control_is_warned_of_for_another_width_only(run, capsys):
    directory = run("--depths", "2..8", "--lrs", "2^-10..2^-4", "--seeds", "2", "mup.parametrization=standard", standard=0.0)
    told = "under the standard parametrisation the best learning rate moves with the width"
    assert told not in apply(capsys, directory)[1]
    assert told in apply(capsys, directory, "--width", "32")[1]


def test_trials_that_failed_are_told(run, capsys):
    directory = run("--lrs", "2^-9..2^-5", "--seeds", "2", skip=lambda trial: trial.axes["lr"] == 2.0**-9)
    config = load_config(directory)
    for trial in expand(config, config.sweep)[:1]:
        Store(directory).add(failed_result(trial, "no memory", "local"))
    _, text, err = apply(capsys, directory)
    assert "Beware: 1 of 10 trials of the sweep failed" in err and "Beware: 1 of 10 trials of the sweep have not run yet" in text
