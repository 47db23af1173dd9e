"""A study from beginning to end, stopped and gone on with."""

from __future__ import annotations

import csv
import json

import pytest

from ipu_lean.cli import main
from ipu_lean.config import SweepConfig, dump_config
from ipu_lean.config.loader import Loaded
from ipu_lean.errors import ConfigError, EnvironmentProblem, Interrupted, RunError
from ipu_lean.sweep.study import commands
from ipu_lean.sweep.study.trial import run_variant
from tests.sweep.helpers import tiny
from tests.sweep.readonly import unwritable

VARIANTS = {"plain": {}, "reversible": {"model.stack.kind": "reversible"}, "wild": {"optimizer.lr": 1e6, "train.clip": None}}


def in_turn(jobs, workers, on_result, train):
    for job in jobs:
        for trial in job:
            on_result(run_variant(trial))


@pytest.fixture
def here(monkeypatch):
    """Variants run in this process: no time goes into starting workers."""
    monkeypatch.setattr(commands, "run_local", in_turn)


def config(tmp_path, variants=VARIANTS, **study):
    return tiny(
        tmp_path, train={"steps": 12}, study={"variants": variants, "seeds": 2, **study}, logging={"progress": "bar"}
    )


def run(given, out, **options):
    return commands.run_study(Loaded(given, {}, ""), str(out), **options)


def test_ranking_files_and_what_is_not_trained_again(tmp_path, here, monkeypatch):
    out, said = tmp_path / "study", []
    summary = run(config(tmp_path), out, say=said.append)
    ranking = summary["metrics"]["ranking"]
    assert ranking[-1]["name"] == "wild" and ranking[-1]["loss"] is None and ranking[-1]["state"].startswith("diverged at")
    told = next(line for text in said for line in text.splitlines() if line.startswith("wild seed 0: diverged"))
    assert f"step {ranking[-1]['state'].split()[2]}" in told  # one counting of updates, from 1
    assert ranking[0]["loss"] <= ranking[1]["loss"] and ranking[0]["spread"] > 0 and summary["metrics"]["note"] is None
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert [(row["variant"], row["seed"]) for row in rows] == [(name, seed) for name in VARIANTS for seed in "01"]
    for row in ranking[:2]:
        mine = [float(line["loss"]) for line in rows if line["variant"] == row["name"]]
        assert sum(mine) / 2 == pytest.approx(row["loss"]) and max(mine) - min(mine) == pytest.approx(row["spread"])
    assert (out / "curves.png").stat().st_size > 5000 and "wild" in (out / "table.txt").read_text()
    assert json.loads((out / "summary.json").read_text())["command"] == "study"
    trained = []

    def note(jobs, *rest, **more):
        trained.extend(trial.axes for job in jobs for trial in job)

    monkeypatch.setattr(commands, "run_local", note)
    assert run(config(tmp_path), out)["metrics"] == summary["metrics"] and trained == []
    run(config(tmp_path, {**VARIANTS, "slow": {"optimizer.lr": 1e-4}}), out)
    assert trained == [{"variant": "slow", "seed": 0}, {"variant": "slow", "seed": 1}]


def test_equal_terms(tmp_path, here):
    """Two variants that compute the same give the same numbers: same weights, same batches."""
    ranking = run(config(tmp_path, {"a": {}, "b": {"memory.loss_chunk": 0}}), tmp_path / "study")["metrics"]["ranking"]
    assert ranking[0]["loss"] == pytest.approx(ranking[1]["loss"], rel=1e-5)


def test_only_variants_and_seeds_may_change(tmp_path, here):
    run(config(tmp_path, {"a": {}}), tmp_path / "study")
    changed = tiny(tmp_path, train={"steps": 13}, study={"variants": {"a": {}}})
    with pytest.raises(ConfigError) as caught:
        run(changed, tmp_path / "study")
    assert caught.value.key == "train.steps" and caught.value.suggestion == "start a new study"


def test_a_second_process_changes_nothing_under_the_first(tmp_path, here):
    run(config(tmp_path, {"a": {}}), tmp_path / "study")
    before, first = (tmp_path / "study" / "config.yaml").read_text(), commands.StudyDirectory(tmp_path / "study")
    first.lock()
    with pytest.raises(RunError, match="another process is running the study in"):
        run(config(tmp_path, {"a": {}, "b": {"optimizer.lr": 1e-4}}), tmp_path / "study")
    assert (tmp_path / "study" / "config.yaml").read_text() == before
    first.unlock()


def test_missing_data_is_told_before_anything_is_written(tmp_path, here):
    nowhere = {"data": {"corpus": str(tmp_path / "nowhere.txt")}}
    for section, words in ((nowhere, "no such file"), ({"batch": {"micro": 5000}}, "one global batch needs 5,000")):
        with pytest.raises(ConfigError, match=words):
            run(tiny(tmp_path, study={"variants": {"a": {}}}, **section), tmp_path / "study")
        assert not (tmp_path / "study").exists()


def test_stopped_and_gone_on_with(tmp_path, monkeypatch):
    def stops(jobs, workers, on_result, train):
        on_result(run_variant(jobs[0][0]))
        raise Interrupted("stopped")

    monkeypatch.setattr(commands, "run_local", stops)
    with pytest.raises(Interrupted):
        run(config(tmp_path), tmp_path / "study")
    assert json.loads((tmp_path / "study" / "summary.json").read_text())["exit_code"] == 130
    monkeypatch.setattr(commands, "run_local", in_turn)
    said = []
    run(config(tmp_path), tmp_path / "study", say=said.append)
    assert "1 finished before" in "\n".join(said)


def test_a_study_and_a_sweep_do_not_take_each_others_directory(tmp_path, here, capsys):
    run(config(tmp_path, {"a": {}}, seeds=1), tmp_path / "study")
    assert main(["sweep", str(tmp_path / "study"), "--lrs", "0.1,0.2"]) == 2
    assert "holds a study" in capsys.readouterr().err
    (tmp_path / "study" / "summary.json").write_text('{"command": "sweep"}')
    with pytest.raises(ConfigError, match="holds a sweep"):
        run(config(tmp_path, {"a": {}}, seeds=1), tmp_path / "study")


def test_nothing_to_rank(tmp_path, here):
    with pytest.raises(RunError, match="nothing to rank"):
        run(config(tmp_path, {"wild": VARIANTS["wild"]}, seeds=1), tmp_path / "study")


def test_the_command_with_worker_processes(tmp_path, capsys):
    file = tmp_path / "study.yaml"
    file.write_text(dump_config(config(tmp_path, {"a": {}, "b": {"optimizer.lr": 0.02}})))
    out = tmp_path / "study"
    assert main(["study", str(file), "--out", str(out), "--seeds", "1", "--json"]) == 0
    head, *rows, _, note, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert {row["name"] for row in summary["metrics"]["ranking"]} == {"a", "b"} and summary["steps"] == 24
    place = head.split().index("spread") + 1  # behind the number of the line
    assert [row.split()[place] for row in rows] == ["-", "-"] and "no ranking" in note and "--seeds" in note
    assert [row["spread"] for row in summary["metrics"]["ranking"]] == [None, None] and summary["metrics"]["note"] == note
    assert main(["study", str(out)]) == 0
    assert "b " in capsys.readouterr().out
    assert main(["study", str(out), "--out", str(tmp_path / "other")]) == 2
    assert main(["study", str(file), "--retry"]) == 2


def test_a_finished_study_that_cannot_be_written_is_shown(tmp_path, here, monkeypatch):
    out, two = tmp_path / "study", {"a": {}, "b": {"optimizer.lr": 0.02}}
    summary = run(config(tmp_path, two, seeds=1), out)
    monkeypatch.setattr(commands, "run_local", lambda jobs, *_, **__: pytest.fail("trained") if jobs else None)
    (tmp_path / "text.txt").unlink()
    said = []
    with unwritable(out):
        shown = run(config(tmp_path, two, seeds=1, expect={"a": {"worse_by": 1e-3}}, reference="b"), out, say=said.append)
        with pytest.raises(EnvironmentProblem, match="does not go on"):
            run(config(tmp_path, {**two, "c": {"optimizer.lr": 0.03}}, seeds=1), out)
    assert shown["verdict"] == "pass" and "verdict: pass" in shown["table"]  # judged anew
    assert [row["loss"] for row in shown["metrics"]["ranking"]] == [row["loss"] for row in summary["metrics"]["ranking"]]
    assert len([text for text in said if "nothing could be written" in text and "Permission denied" in text]) == 1
    assert json.loads((out / "summary.json").read_text())["verdict"] is None


def test_a_sweep_that_has_not_run_is_no_study(tmp_path, here, capsys):
    """Neither has a summary; what their configurations held besides does not mix them up."""
    both = config(tmp_path, {"a": {}}, seeds=1).model_copy(update={"sweep": SweepConfig(lrs=[0.1, 0.2])})
    (tmp_path / "both.yaml").write_text(dump_config(both))
    assert main(["sweep", str(tmp_path / "both.yaml"), "--plan", "--out", str(tmp_path / "sweep")]) == 0
    before = (tmp_path / "sweep" / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="holds a sweep"):
        run(both, tmp_path / "sweep")
    assert (tmp_path / "sweep" / "config.yaml").read_text() == before
    run(both, tmp_path / "study")
    (tmp_path / "study" / "summary.json").unlink()
    capsys.readouterr()
    assert main(["sweep", str(tmp_path / "study")]) == 2 and "holds a study" in capsys.readouterr().err
    assert run(both, tmp_path / "study")["metrics"]["ranking"][0]["name"] == "a"
