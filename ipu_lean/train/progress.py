"""What a person sees while a run goes on: a bar on a terminal, otherwise lines that a program can read too.

step 120/300  loss 2.4170  lr 2.31e-03  tokens/s 18400  data-wait 0.3%  grad 0.84
eval 120/300  valid  loss 2.5012  accuracy 0.3134  perplexity 12.20  tokens 21734
"""

from __future__ import annotations

import os
import sys
import time
import unicodedata
from typing import Any, Dict, Optional, TextIO

from ipu_lean.train.engines.protocol import StepResult


def printable(text: str) -> str:
    """Text for a terminal: control characters, which a young model writes freely, are shown (as `\\x1b`) and not sent."""
    shown = {char: char.encode("unicode_escape").decode("ascii") for char in set(text) if unicodedata.category(char) == "Cc"}
    return "".join(char if char in "\n\t" else shown.get(char, char) for char in text)


def figure(value: float, digits: int, most: float) -> str:
    """A number with `digits` decimals; above `most` as 1.23e+09, so that a run that blew up stays readable."""
    return f"{value:.{digits}f}" if abs(value) <= most else f"{value:.2e}"


class Speed:
    """Tokens per second and the share of time spent waiting for data: this process only, and without its first step (which
    allocates).
    """

    def __init__(self) -> None:
        self._start: Optional[float] = None
        self._tokens, self._wait = 0, 0.0

    def add(self, tokens: int, wait: float) -> None:
        """After each step: labels it saw, and seconds spent waiting for its batch."""
        if self._start is None:
            self._start = time.perf_counter()
            return
        self._tokens += tokens
        self._wait += wait

    def pause(self, seconds: float) -> None:
        """Leave out time spent on evaluation and saving."""
        if self._start is not None:
            self._start += seconds

    @property
    def _elapsed(self) -> float:
        return 0.0 if self._start is None or not self._tokens else time.perf_counter() - self._start

    @property
    def tokens_per_s(self) -> Optional[float]:
        """None until the second step."""
        return round(self._tokens / self._elapsed, 1) if self._elapsed > 0 else None

    @property
    def data_wait(self) -> Optional[float]:
        """Between 0 and 1; None until the second step."""
        return round(self._wait / self._elapsed, 4) if self._elapsed > 0 else None


class Reporter:
    """Speaks for a run.

    Args:
        style: `auto`, `bar`, `plain` or `none` (logging.progress).
        out: where lines go; the bar goes to stderr, so that stdout stays readable for programs.
    """

    def __init__(self, style: str = "auto", out: Optional[TextIO] = None, err: Optional[TextIO] = None) -> None:
        self._out, self._err = out or sys.stdout, err or sys.stderr
        bar = style == "bar" or (style == "auto" and self._err.isatty())
        self._style = style if style == "none" else ("bar" if bar else "plain")
        self._bar: Optional[Any] = None
        self._stage = ""

    def line(self, text: str) -> None:
        """One line (or several) of text, above the bar if there is one."""
        if self._style == "none":
            return
        if self._bar is not None:
            self._bar.clear()
        if self._out.isatty():
            text = printable(text)
        # A sample may hold characters that this terminal's encoding has not.
        encoding = getattr(self._out, "encoding", None) or "utf-8"
        try:
            self._out.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._out.flush()
        except BrokenPipeError:
            self._unread()
        if self._bar is not None:
            self._bar.refresh()

    def warn(self, text: str) -> None:
        """A line that matters even when everything else is silent."""
        self._err.write(text + "\n")
        self._err.flush()

    def _unread(self) -> None:
        """Whoever read the lines went away (`| head`): hours of training do not end for that, they go on without lines."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._out.fileno())  # also for what others print later, and for what still waits in the buffer
        os.close(nowhere)
        self._style = "none" if self._bar is None else self._style
        self.warn("warning: nobody reads the output any more; going on without it.")

    def preparing(self, stage: str, done: int, total: int) -> None:
        """Called while the corpus is made into tokens; says each stage once."""
        if stage != self._stage:
            self._stage = stage
            self.line(f"preparing the data: {stage}")

    def begin(self, step: int, steps: int) -> None:
        """Training starts after `step` of `steps` updates."""
        if self._style == "bar":
            from tqdm import tqdm

            shape = "{percentage:3.0f}% |{bar:16}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
            # Some terminals say that they have no rows, and tqdm would then show nothing.
            self._bar = tqdm(total=steps, initial=step, file=self._err, dynamic_ncols=True, nrows=24, bar_format=shape)

    def step(self, step: int, steps: int, result: StepResult, speed: Speed, log: bool) -> None:
        """After each update; `log` marks those that also go to the metrics file."""
        numbers = step_text(result, speed)
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix_str(numbers, refresh=False)
        elif log:
            self.line(f"step {step}/{steps}  {numbers}")

    def evaluation(self, step: int, steps: int, name: str, metrics: Dict[str, Any]) -> None:
        """One validation set's figures."""
        self.line(
            f"eval {step}/{steps}  {name}  loss {figure(metrics['loss'], 4, 1e4)}  accuracy {metrics['accuracy']:.4f}  "
            f"perplexity {figure(metrics['perplexity'], 2, 1e6)}  tokens {metrics['tokens']}"
        )

    def end(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def step_text(result: StepResult, speed: Speed) -> str:
    """`loss 2.4170  lr 2.31e-03  tokens/s 18400  data-wait 0.3%  grad 0.84`, without what is not known yet."""
    parts = [f"loss {figure(result.loss, 4, 1e4)}", f"lr {result.lr:.2e}"]
    if speed.tokens_per_s is not None:
        parts += [f"tokens/s {speed.tokens_per_s:.0f}", f"data-wait {100 * (speed.data_wait or 0.0):.1f}%"]
    if result.grad_norm is not None:
        parts.append(f"grad {result.grad_norm:.2f}")
    if result.skipped:
        parts.append("skipped (loss scale)")
    return "  ".join(parts)
