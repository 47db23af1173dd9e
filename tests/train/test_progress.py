"""Lines that a program can read, a bar for people, and a speed that leaves the first step out."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from ipu_lean.train import progress
from ipu_lean.train.engines.protocol import StepResult
from ipu_lean.train.progress import Reporter, Speed, printable, step_text

pytestmark = pytest.mark.pod
LINE = re.compile(
    r"step (\d+)/(\d+)  loss (\d+\.\d{4})  lr (\d\.\d\de[-+]\d\d)"
    r"(?:  tokens/s (\d+)  data-wait (\d+\.\d)%)?(?:  grad (\d+\.\d\d))?$"
)


def result(**values: Any) -> StepResult:
    return StepResult(**{"loss": 2.5, "sums": (), "lr": 1e-3, "tokens": 100, "grad_norm": 0.5, **values})


def test_speed_counts_this_process_without_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 100.0}
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock["now"])
    speed = Speed()
    clock["now"] += 50.0
    speed.add(1000, 40.0)
    assert speed.tokens_per_s is None and speed.data_wait is None
    for _ in range(4):
        clock["now"] += 2.0
        speed.add(1000, 0.5)
    assert speed.tokens_per_s == 500.0 and speed.data_wait == 0.25
    clock["now"] += 8.0
    speed.pause(8.0)
    assert speed.tokens_per_s == 500.0, "evaluation and saving do not count"


def test_plain_lines_can_be_parsed() -> None:
    out = io.StringIO()
    report = Reporter("plain", out, io.StringIO())
    report.begin(0, 20)
    for step in range(1, 4):
        report.step(step, 20, result(), Speed(), log=step != 2)
    report.end()
    found = [LINE.match(line) for line in out.getvalue().splitlines()]
    assert [match.group(1, 3) for match in found] == [("1", "2.5000"), ("3", "2.5000")]
    assert "skipped" in step_text(result(grad_norm=None, skipped=True), Speed())


def test_a_run_that_blew_up_stays_readable() -> None:
    assert step_text(result(loss=9999.5), Speed()).startswith("loss 9999.5000  lr")
    assert step_text(result(loss=123456.0), Speed()).startswith("loss 1.23e+05  lr")
    out = io.StringIO()
    for loss, perplexity in ((2.5, 12.2), (20000.0, 2.5e43)):
        metrics = {"loss": loss, "accuracy": 0.5, "perplexity": perplexity, "tokens": 9}
        Reporter("plain", out).evaluation(1, 2, "valid", metrics)
    assert "loss 2.5000  accuracy 0.5000  perplexity 12.20  " in out.getvalue()
    assert "loss 2.00e+04  accuracy 0.5000  perplexity 2.50e+43  " in out.getvalue()


def test_auto_takes_the_bar_on_a_terminal_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out, err = io.StringIO(), Terminal()
    report = Reporter("auto", out, err)
    report.begin(3, 20)
    report.step(4, 20, result(), Speed(), log=True)
    report.line("eval")
    report.end()
    assert out.getvalue() == "eval\n" and "4/20" in err.getvalue() and "loss 2.5000" in err.getvalue()
    plain = io.StringIO()
    Reporter("auto", plain, io.StringIO()).step(1, 2, result(), Speed(), log=True)
    assert LINE.match(plain.getvalue().strip())


def test_a_narrow_encoding_does_not_stop_the_run() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    Reporter("plain", out, io.StringIO()).line("caf\u00e9 \ud83d")
    assert raw.getvalue() == b"caf? ?\n"


def test_none_is_silent_except_for_warnings() -> None:
    out, err = io.StringIO(), io.StringIO()
    report = Reporter("none", out, err)
    report.line("x")
    report.preparing("tokenize", 0, None)
    report.step(1, 2, result(), Speed(), log=True)
    report.warn("careful")
    assert out.getvalue() == "" and err.getvalue() == "careful\n"


def test_control_characters_are_shown_on_a_terminal_only() -> None:
    assert printable("a\x1b[2Jb\x08\n\tc\x9bé") == "a\\x1b[2Jb\\x08\n\tc\\x9bé"
    piped, terminal = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    for out in (piped, terminal):
        Reporter("plain", out, io.StringIO()).line("x\x1by")
    assert piped.getvalue() == "x\x1by\n" and terminal.getvalue() == "x\\x1by\n"
