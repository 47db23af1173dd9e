"""Variants beside their reference: differences of equal seeds, and what is expected of them."""

from __future__ import annotations

import json
import math

import pytest

from ipu_lean.cli import main
from ipu_lean.config import StudyConfig, dump_config
from ipu_lean.config.loader import Loaded
from ipu_lean.errors import ConfigError, VerdictFailed
from ipu_lean.sweep.study import commands
from ipu_lean.sweep.study.judge import compare, judge
from ipu_lean.sweep.study.result import VariantResult
from ipu_lean.sweep.study.trial import run_variant
from ipu_lean.sweep.study.variants import variants_of
from tests.sweep.helpers import tiny

pytestmark = pytest.mark.pod


def result(name, seed, loss, norm=10.0, status="done"):
    axes = {"variant": name, "seed": seed}
    return VariantResult(f"{name}{seed}", axes, status, [loss], loss, {"valid": loss}, weight_norm=norm)


REFERENCE = [result("base", seed, loss) for seed, loss in enumerate([2.0, 4.0, 3.0])]


def comparison(losses, norms=(10.0, 10.0, 10.0), **more):
    return compare([result("it", seed, loss, norm, **more) for seed, (loss, norm) in enumerate(zip(losses, norms))], REFERENCE)


def verdicts(one, seeds=3, **wanted):
    study = StudyConfig(variants={"base": {}, "it": {}}, seeds=seeds, reference="base", expect={"it": wanted})
    return judge(study, {"it": one})


def test_differences_are_taken_seed_by_seed():
    """The losses scatter by 2, the differences by 0.02 only."""
    one = comparison([2.01, 4.03, 3.02], [10.0, 10.1, 9.8])
    assert one.seeds == 3 and one.reference == 3.0
    assert one.difference == pytest.approx(0.02) and one.spread == pytest.approx(0.02) and one.norm == pytest.approx(0.02)


def test_only_seeds_that_both_have_count():
    one = compare([result("it", 1, 4.5), result("it", 7, 1.0), result("it", 2, math.inf, status="diverged")], REFERENCE)
    assert (one.seeds, one.difference, one.reference) == (1, 0.5, 4.0)
    assert compare([result("it", 7, 1.0)], REFERENCE) is None
    assert compare([result("it", 0, 1.0, norm=None)], REFERENCE).norm is None


@pytest.mark.parametrize(
    ("losses", "status"),
    [
        ([2.0029, 4.0029, 3.0029], "pass"),  # a thousandth of 3.0
        ([2.02, 4.02, 3.02], "fail"),  # seven times as much, alike with every seed
        ([1.98, 3.98, 2.98], "fail"),  # better is not alike either
        ([2.0, 4.06, 3.0], "pass"),  # as large on average, but it comes from one seed
    ],
)
def test_within_a_share_or_the_spread(losses, status):
    (found,) = verdicts(comparison(losses), within=1e-3)
    assert found.status == status


def test_one_seed_has_no_spread():
    """Not a spread of zero, which would say that seeds do not matter."""
    one = compare([result("it", 1, 4.002)], REFERENCE)
    assert one.spread is None and one.relative_spread is None and one.relative == pytest.approx(5e-4)
    (found,) = verdicts(one, seeds=1, within=1e-3)
    assert found.status == "pass" and found.threshold == 1e-3 and "one seed" in found.text
    assert verdicts(compare([result("it", 1, 4.02)], REFERENCE), seeds=1, within=1e-3)[0].status == "fail"


@pytest.mark.parametrize(
    ("losses", "status"), [([2.016, 4.016, 3.016], "pass"), ([2.01, 4.01, 3.01], "fail"), ([2.0, 4.0, 3.0], "fail")]
)
def test_worse(losses, status):
    assert verdicts(comparison(losses), worse_by=5e-3)[0].status == status


@pytest.mark.parametrize(("norm", "status"), [(10.009, "pass"), (9.991, "pass"), (10.02, "fail"), (9.98, "fail")])
def test_the_worst_norm_counts(norm, status):
    assert verdicts(comparison([2.0, 4.0, 3.0], [10.0, norm, 10.0]), norm_within=1e-3)[0].status == status


def test_missing_seeds_are_inconclusive():
    study = {"within": 1e-3, "norm_within": 1e-3}
    for one in (None, comparison([2.0, 4.0])):
        assert [verdict.status for verdict in verdicts(one, **study)] == ["inconclusive"] * 2
    assert verdicts(comparison([2.0, 4.0, 3.0], [None] * 3), norm_within=1e-3)[0].status == "inconclusive"


@pytest.mark.parametrize(
    ("study", "key"),
    [
        ({"reference": "c"}, "study.reference"),
        ({"expect": {"b": {"within": 0.1}}}, "study.expect.b"),
        ({"reference": "a", "expect": {"a": {"within": 0.1}}}, "study.expect.a"),
        ({"reference": "a", "expect": {"c": {"within": 0.1}}}, "study.expect.c"),
        ({"reference": "a", "expect": {"b": {}}}, "study.expect.b"),
        ({"reference": "a", "expect": {"b": {"within": 0.1, "worse_by": 0.1}}}, "study.expect.b"),
    ],
)
def test_expectations_that_cannot_be(tmp_path, study, key):
    with pytest.raises(ConfigError) as caught:
        variants_of(tiny(tmp_path, study={"variants": {"a": {}, "b": {}}, **study}))
    assert caught.value.key == key


def in_turn(jobs, workers, on_result, train):
    for job in jobs:
        for trial in job:
            on_result(run_variant(trial))


def test_the_command_has_a_verdict(tmp_path, monkeypatch, capsys):
    """A variant that computes the same passes; one that learns at a hundredth of the rate is worse."""
    monkeypatch.setattr(commands, "run_local", in_turn)
    variants = {"a": {}, "same": {"memory.loss_chunk": 0}, "slow": {"optimizer.lr": 1e-4}}
    expect = {"same": {"within": 1e-3, "norm_within": 1e-3}, "slow": {"worse_by": 0.05}}
    config = tiny(tmp_path, train={"steps": 12}, study={"variants": variants, "reference": "a", "expect": expect})
    out = tmp_path / "study"
    summary = commands.run_study(Loaded(config, {}, ""), str(out))
    assert (summary["verdict"], summary["exit_code"]) == ("pass", 0) and "verdict: pass" in (out / "table.txt").read_text()
    rows = {row["name"]: row for row in summary["metrics"]["ranking"]}
    assert rows["a"]["beside_reference"] is None and rows["slow"]["beside_reference"]["difference"] > 0.1
    assert rows["same"]["weight_norm"] == pytest.approx(rows["a"]["weight_norm"], rel=1e-6)
    file = tmp_path / "other.yaml"
    other = {"variants": variants, "reference": "a", "expect": {"slow": {"within": 0.01}}}
    file.write_text(dump_config(tiny(tmp_path, train={"steps": 12}, study=other)))
    capsys.readouterr()
    assert main(["study", str(file), "--out", str(out), "--json"]) == 4  # the same runs under another expectation
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["verdict"], summary["status"]) == ("fail", "failed") and "slow as good as a" in summary["error"]
    with pytest.raises(VerdictFailed, match="1 of 2 seeds"):
        commands._finish(*_unfinished(out, config), strict=True, seconds=0.0, say=print)


def _unfinished(out, config):
    """The study's directory as it is while a seed is still missing."""
    study = config.study.model_copy(update={"seeds": [0, 1]})
    config = config.model_copy(update={"study": study})
    return commands.StudyDirectory(out), config, variants_of(config)
