"""`memory`: the formulas against closed forms, and what a fresh process holds against the formulas."""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict, Tuple

import pytest
import torch

from ipu_lean._compat import TORCH
from ipu_lean.cli import main
from ipu_lean.config import make_config
from ipu_lean.errors import ConfigError, RunError
from ipu_lean.models import build_meta
from ipu_lean.train.memory import commands, worker
from ipu_lean.train.memory.footprint import predicted, sizes_of
from ipu_lean.train.memory.modes import MODES, chosen, on_device, with_mode
from ipu_lean.train.memory.report import format_table

VOCAB = 2048


def config_of(**sections: Any) -> Any:
    model = {"width": 128, "depth": 3, "heads": 2, "seq": 64, "vocab": VOCAB, **sections.pop("model", {})}
    return make_config(model=model, **{"mup": {"base_width": 64}, "batch": {"micro": 4}, **sections})


def command(capsys: Any, *words: str) -> Tuple[int, Dict[str, Any], str]:
    """(exit code, the summary, everything before it)."""
    code = main(["memory", *words, "--json"])
    lines = capsys.readouterr().out.rstrip().splitlines()
    return code, json.loads(lines[-1]), "\n".join(lines[:-1])


@pytest.mark.pod
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_bytes_a_parameter_are_those_of_the_arithmetic(mode: Any) -> None:
    config = with_mode(on_device(config_of()), mode)
    sizes = sizes_of(build_meta(config, VOCAB))
    found = predicted(config, sizes, VOCAB)
    count, gradient = sum(sizes), 2 if mode.precision == "bf16-pure" else 4
    held = {"kahan": 10, "split": 10, "stochastic": 8, "none": 8, None: 16}[mode.summation]
    if not mode.fused:
        assert found.held == held * count and found.gradients == gradient * count
        return
    small = sum(size for size in sizes if size < 4096)
    assert found.gradients == gradient * (max(sizes) + small)
    assert found.held == (held - gradient) * count + found.gradients


@pytest.mark.pod
def test_a_small_model_that_updates_in_passing_makes_no_more_for_it_than_a_tensor_needs() -> None:
    """Updated at once are 65,536 elements, and of a fused update one tensor, or the small ones that wait for the end."""
    sizes = [64 * 257, 64 * 64, 64 * 64, *[64] * 8]
    config = config_of(model={"width": 64, "depth": 1, "heads": 2, "seq": 64}, mup={"base_width": 32}, precision="bf16-pure")
    whole, fused = (predicted(with_mode(config, mode), sizes, 257) for mode in chosen(["bf16-pure/none", "bf16-pure/none+fused"]))
    standing = fused.held - fused.gradients + fused.copies + fused.activations
    assert fused.peak == standing + 40 * max(sizes) and whole.peak >= whole.held + 40 * sum(sizes)


def test_other_optimizers_hold_other_moments() -> None:
    def held(**optimizer: Any) -> Tuple[int, int, int]:
        config = config_of(precision="bf16-pure", optimizer=optimizer)
        found = predicted(config, [1000], VOCAB)
        return found.moments, found.compensation, found.held

    assert held() == (4000, 2000, 10_000)
    assert held(betas=[0.9, 0.999]) == (6000, 2000, 12_000)
    assert held(betas=[0.9, 0.999], variance="stochastic") == (4000, 2000, 10_000)
    assert held(betas=[0.999, 0.95]) == (6000, 2000, 12_000)
    assert predicted(config_of(optimizer={"kind": "sgd"}), [1000], VOCAB).held == 8000
    assert predicted(config_of(optimizer={"kind": "sgd", "momentum": 0.9}), [1000], VOCAB).held == 12_000


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: Any) -> Path:
    """4 million parameters, few activations."""
    path = tmp_path_factory.mktemp("memory") / "config.yaml"
    model = {"width": 256, "depth": 4, "head_size": 64, "seq": 16, "vocab": 4096}
    path.write_text(json.dumps({"model": model, "mup": {"base_width": 64}, "batch": {"micro": 1}}))
    return path


ALLOCATOR = """
import ctypes
for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    ctypes.CDLL(None).mallopt(option, 65536)
from ipu_lean.train.memory import commands, worker
commands.in_fresh_process = worker.measure
"""


def check_row(row: Dict[str, Any], bytes_per_parameter: float) -> None:
    found = row["measured"]
    assert found["source"] == "process" and found["bytes_per_parameter"] == pytest.approx(bytes_per_parameter, rel=0.03)
    assert 0 < found["other"] < 0.03 * found["held"]
    assert found["peak"] == pytest.approx(row["predicted"]["peak"], rel=0.15)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says what a process holds")
@pytest.mark.skipif(not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"), reason="needs torch 2.1")
def test_a_fresh_process_holds_what_the_formula_says(yaml: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    code, summary, text = command(capsys, str(yaml), "--modes", "bf16-pure/stochastic+fused", "--out", str(out))
    assert code == 0 and summary["status"] == "ok" and json.loads((out / "summary.json").read_text()) == summary
    (row,) = summary["metrics"]["modes"]
    check_row(row, 6.0 + 2 * summary["metrics"]["largest"] / summary["metrics"]["parameters"])
    assert (out / "memory.png").stat().st_size > 5000 and "bf16-pure/stochastic+fused" in (out / "memory.txt").read_text()
    assert "10.00" in text and "fp16-ipu" in text and "says something from" not in text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says what a process holds")
@pytest.mark.skipif(TORCH < (2, 1), reason="storages cannot be followed")
def test_a_process_holds_what_the_formula_says(yaml: Path, tmp_path: Path, zygote: Any) -> None:
    """The same without an update in the backward pass, in a process that has imported everything already."""
    words = ["memory", yaml, "--modes", "bf16-pure/kahan", "--out", tmp_path / "out", "--json"]
    ended = zygote.run(words, prelude=ALLOCATOR)
    assert ended.code == 0, ended.err
    (row,) = ended.summary["metrics"]["modes"]
    check_row(row, 10.0)
    assert row["measured"]["parameters"] == ended.summary["metrics"]["parameters"]
    assert row["measured"]["held_weights"] == pytest.approx(row["predicted"]["weights"], rel=0.03)
    for name in ("weights", "gradients", "moments", "compensation"):
        assert row["measured"][name] == pytest.approx(row["predicted"][name], rel=0.005), name


@pytest.mark.pod
def test_a_model_that_is_too_small_to_be_measured_is_told_so() -> None:
    def table(parameters: int) -> str:
        measured = {"other": 250_000, "bytes_per_parameter": 12.3, "held": 1, "copies": 0, "activations": 0, "peak": 1}
        formula = predicted(config_of(precision="bf16-pure"), [parameters], VOCAB).as_dict(parameters)
        row = {"mode": "a", "status": "ok", "predicted": formula, "measured": measured, "difference": 0.23}
        unmeasured = {**row, "mode": "b", "measured": None, "difference": None}
        ipu = {"status": "refused", "reason": "none"}
        rest = {"largest": 1, "rows": 1, "seq": 1, "device": "cpu", "ipu": ipu}
        return format_table({"parameters": parameters, "modes": [row, unmeasured], **rest})

    assert "up to 0.25 MB of what was measured are Python's objects" in table(100_000)
    assert "says something from about 500,000 parameters on" in table(499_000)
    assert "says something from" not in table(500_000)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says what a process holds")
def test_a_system_that_cannot_forget_a_peak_has_none(monkeypatch: Any) -> None:
    """Some containers lack /proc/self/clear_refs."""
    meter = worker.Meter(torch.device("cpu"))
    meter.mark()
    assert meter.source == "process" and meter.peak() > 0

    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "write_text", missing)
    # 4 million parameters: what earlier tests in this process leave to be freed is little beside 40 MB.
    model = {"width": 256, "depth": 4, "seq": 16}
    config = with_mode(on_device(config_of(model=model)), chosen(["bf16-pure/kahan"])[0])
    found = worker.measure(config, VOCAB)
    assert found["peak"] is None and found["held"] > found["weights"] > 0
    row = {"mode": "a", "status": "ok", "predicted": predicted(config, [10], VOCAB).as_dict(10), "difference": 0.0}
    row["measured"] = {**found, "bytes_per_parameter": 10.0}
    ipu = {"status": "refused", "reason": "none"}
    rest = {"parameters": 10**9, "largest": 1, "rows": 1, "seq": 1, "device": "cpu", "ipu": ipu}
    assert format_table({**rest, "modes": [row]}).splitlines()[-3].endswith(" -")


@pytest.mark.pod
def test_a_model_that_is_too_large_is_predicted(tmp_path: Path, capsys: Any) -> None:
    """OPT 1.3B: 13 GB in pure bf16 where fp32 takes 21."""
    path = tmp_path / "opt.yaml"
    model = {"width": 2048, "depth": 24, "heads": 32, "ffn_width": 8192, "seq": 2048, "vocab": 50272, "positions": "learned"}
    path.write_text(json.dumps({"model": model, "mup": {"parametrization": "standard"}}))
    code, summary, text = command(capsys, str(path), "--predict", "--out", str(tmp_path / "out"))
    assert code == 0 and summary["metrics"]["predicted_only"]
    held = {row["mode"]: row["predicted"]["held"] / 1e9 for row in summary["metrics"]["modes"]}
    assert held["bf16-pure/kahan"] == pytest.approx(13.15, rel=0.01) and held["fp32"] == pytest.approx(21.05, rel=0.01)
    assert all(row["measured"] is None for row in summary["metrics"]["modes"])
    ipu = summary["metrics"]["ipu"]
    assert ipu["predicted"]["bytes_per_parameter"] == 10 and ipu["plan"]["verdict"] == "no" and "no (`ipu-lean plan`" in text


@pytest.mark.pod
def test_what_cannot_be_is_said(yaml: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    words = [str(yaml), "optimizer.kind=sgd", "--predict", "--modes", "fp32,bf16-pure/split", "--out", str(tmp_path / "sgd")]
    code, summary, text = command(capsys, *words)
    first, second = summary["metrics"]["modes"]
    assert code == 0 and first["status"] == "ok" and second["status"] == "refused"
    assert "AdamW only" in second["reason"] and "bf16-pure/split: refused" in text
    code, summary, _ = command(capsys, str(yaml), "--modes", "bf16-pure/kahn")
    assert code == 2 and "Did you mean bf16-pure/kahan?" in summary["error"]
    for modes, words in (("", "this names no mode"), ("fp32,fp16-ipu", "this is a formula, and always listed. Leave it out.")):
        code, summary, _ = command(capsys, str(yaml), "--modes", modes)
        assert code == 2 and words in summary["error"]

    def fails(*_: Any) -> Any:
        raise RunError("the measuring process ended with -9: it was killed; did memory run out?")

    monkeypatch.setattr(commands, "in_fresh_process", fails)
    code, summary, _ = command(capsys, str(yaml), "--modes", "fp32", "--out", str(tmp_path / "killed"))
    assert code == 1 and "did memory run out?" in summary["error"]
    assert json.loads((tmp_path / "killed" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.pod
def test_modes_and_devices() -> None:
    assert len({mode.name for mode in MODES}) == 13 == len(chosen(None))
    for name, words in (
        ("fp16-mixed+fused", "an overflow in one gradient skips the whole update"),
        ("bf16-pure", "They are bf16-pure/kahan, bf16-pure/kahan\\+fused, bf16-pure/split, .*bf16-pure/none\\+fused\\.$"),
        ("bf16-pure/khan", "Did you mean bf16-pure/kahan\\?"),
    ):
        with pytest.raises(ConfigError, match=words):
            chosen([name])
    emulated = make_config(device="ipu-emulated", mup={"base_width": 64}, batch={"micro": 2, "replicas": 2, "accumulation": 4})
    here = on_device(emulated)
    assert here.device == "cpu" and here.batch.global_batch == 2
    assert with_mode(here, chosen(["bf16-pure/split+fused"])[0]).memory.fused_update
