"""`coord-check` from the command line: verdicts, exit codes, files."""
from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, List, Tuple

import pytest
import torch

from ipu_lean.cli import main
from ipu_lean.cli.coord import sizes
from ipu_lean.errors import ConfigError
from ipu_lean.mup.verdict import INCONCLUSIVE, Verdict
from ipu_lean.sweep.coord import commands
from tests.train.helpers import write_corpus

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """A small text, prepared once."""
    path = tmp_path_factory.mktemp("coord")
    write_corpus(path / "corpus.txt", 3000)
    (path / "config.yaml").write_text(
        f"""
model: {{width: 32, depth: 2, heads: 2, seq: 16, stack: {{kind: residual}}}}
mup: {{base_width: 16}}
batch: {{micro: 8}}
optimizer: {{lr: 1e-2}}
data: {{corpus: {path / "corpus.txt"}, cache: {path / "cache"}, validation: {{valid: 0.1}}}}
train: {{steps: 100}}
"""
    )
    return path


def command(capsys: Any, *words: str) -> Tuple[int, dict, str]:
    """(exit code, the summary, standard error)."""
    code = main(["coord-check", *words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out.strip().splitlines()[-1]), err


def test_a_sound_model_passes_and_leaves_everything_in_the_run_directory(folder: Path, capsys: Any) -> None:
    words = ["--widths", "16,32,64", "--steps", "4", "--depths", "2..4", "--out", str(folder / "ok")]
    code, summary, _ = command(capsys, str(folder / "config.yaml"), *words)
    assert summary["verdict"] in ("pass", "inconclusive") and code == 0 == summary["exit_code"], summary["metrics"]
    metrics = summary["metrics"]
    assert metrics["faults"] == []
    assert metrics["settings"]["widths"] == [16, 32, 64] and metrics["settings"]["depths"] == [2, 4]
    assert metrics["growth"]["mup"] < 0.4 < metrics["growth"]["standard"]
    assert json.loads((folder / "ok" / "summary.json").read_text()) == summary
    for name in ("changes.png", "values.png", "updates.png", "depth.png", "coord.txt", "config.yaml"):
        assert (folder / "ok" / name).stat().st_size > 200, name
    rows = list(csv.DictReader((folder / "ok" / "coordinates.csv").open()))
    assert {row["run"] for row in rows} == {"mup", "standard", "depth", "depth-none"}
    mup = [row for row in rows if row["run"] == "mup" and row["module"] == "norm"]
    assert len(mup) == 3 * 2 * 5 and {row["size"] for row in mup} == {"16", "32", "64"}
    report = json.loads((folder / "ok" / "coord.json").read_text())
    assert [each["name"] for each in report["verdicts"]][-2:] == ["branches over depth", "changes over depth"]


def test_the_standard_parametrisation_fails_with_its_name_and_exits_with_4(folder: Path, capsys: Any) -> None:
    code, summary, err = command(
        capsys, str(folder / "config.yaml"), "mup.parametrization=standard", "--widths", "16..64", "--steps", "4", "--seeds", "1",
        "--out", str(folder / "standard"),
    )  # fmt: skip
    assert code == 4 == summary["exit_code"] and summary["verdict"] == "fail"
    assert summary["metrics"]["faults"] == ["standard-parametrization"]
    assert "standard parametrisation" in err
    assert (folder / "standard" / "coord.txt").read_text().rstrip().endswith("verdict: fail")


def test_an_inconclusive_verdict_exits_with_4_only_if_strict(folder: Path, capsys: Any, monkeypatch: Any) -> None:
    verdict = Verdict("activation changes", INCONCLUSIVE, 0.3, 0.2, "the seeds do not agree")
    monkeypatch.setattr(commands, "judge", lambda figures, control: [verdict])
    words = [str(folder / "config.yaml"), "--widths", "16,32", "--steps", "4", "--seeds", "1"]
    code, summary, err = command(capsys, *words, "--out", str(folder / "open"))
    assert (code, summary["verdict"]) == (0, "inconclusive") and "the seeds do not agree" in err
    code, summary, _ = command(capsys, *words, "--strict", "--out", str(folder / "strict"))
    assert (code, summary["verdict"]) == (4, "inconclusive")


@pytest.mark.parametrize(
    "words, key",
    [
        (["--widths", "64"], "--widths"),
        (["--widths", "64,many"], "--widths"),
        (["--widths", "15,31"], "--widths"),
        (["--widths", "15,17"], "`model.heads: 2`: this must divide model.width, which is 15"),
        (["--steps", "2"], "--steps"),
        (["--seeds", "0"], "--seeds"),
        (["--lr", "-1"], "--lr"),
        (["--depths", "2"], "--depths"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(folder: Path, capsys: Any, words: list, key: str) -> None:
    out = folder / "never"
    code = main(["coord-check", str(folder / "config.yaml"), *words, "--out", str(out)])
    err = capsys.readouterr().err
    assert code == 2 and key in err, err
    assert not out.exists()


def test_an_mlp_has_no_depth_to_check(capsys: Any) -> None:
    assert main(["coord-check", "configs/cifar_mlp.yaml", "--depths", "2..8"]) == 2
    assert "residual branches" in capsys.readouterr().err


def test_sizes_are_lists_or_doublings() -> None:
    assert sizes("64,128, 256", "--widths") == [64, 128, 256]
    assert sizes("2..64", "--depths") == [2, 4, 8, 16, 32, 64]
    assert sizes("3..20", "--depths") == [3, 6, 12]
    assert sizes(None, "--depths") is None
    with pytest.raises(ConfigError):
        sizes("2..many", "--depths")


STOCHASTIC = ["optimizer.summation=stochastic", "optimizer.variance=stochastic"]


@pytest.mark.parametrize("keys", [["optimizer.summation=split"], STOCHASTIC], ids=["split", "stochastic"])
def test_what_only_16_bit_weights_read_does_not_stand_in_the_way(folder: Path, capsys: Any, keys: List[str]) -> None:
    """A check is in fp32, where nothing has to be kept beside the weights."""
    words = ["--widths", "16,32", "--steps", "4", "--seeds", "1", "--out", str(folder / keys[0])]
    fused = ["train.clip=null", "memory.fused_update=true"]
    code, summary, _ = command(capsys, str(folder / "config.yaml"), "precision=bf16-pure", *keys, *fused, *words)
    assert code == 0 and summary["metrics"]["faults"] == []
