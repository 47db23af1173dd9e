"""The errors a user can meet. Each carries the exit code of the command that it ends; the text is one paragraph.

Exit codes: 0 ok, 1 a run failed, 2 configuration, 3 environment, 4 a verdict failed, 130 interrupted after saving.
Our own bugs are not in here: they are assertions and show a traceback.
"""
from __future__ import annotations

import difflib
from typing import Any, Dict, Iterable, Optional


class IpuLeanError(Exception):
    """Anything that we can explain to the person who typed the command."""

    exit_code = 1


class RunError(IpuLeanError):
    """A run started and could not go on: non-finite loss, full disk, unreadable checkpoint."""

    exit_code = 1


class CheckpointError(RunError):
    """A checkpoint is missing, incomplete or damaged; the text names the file."""


class EnvironmentProblem(IpuLeanError):
    """The machine lacks something: a package, a device, a permission. The text says how to get it."""

    exit_code = 3


class VerdictFailed(IpuLeanError):
    """A check ran to its end and its answer is no (parity, coordinate check, plan, …). `summary`: what `--json` prints."""

    exit_code = 4

    def __init__(self, text: str, summary: Optional[Dict[str, Any]] = None) -> None:
        super().__init__(text)
        self.summary = summary


class Interrupted(IpuLeanError):
    """The user stopped the run; it has been saved and the text is the command that resumes it."""

    exit_code = 130


class ConfigError(IpuLeanError):
    """A mistake in the configuration or in a command's arguments.

    Args:
        rule: what must hold, as a sentence without its final full stop.
        key: dotted path of the key at fault, such as `model.heads`.
        value: the value found there (shown by `as_written`).
        suggestion: what to do about it, as a sentence without its final full stop (a question keeps its mark).
        file, line: where the value was written, when known.
    """

    exit_code = 2

    def __init__(
        self,
        rule: str,
        *,
        key: Optional[str] = None,
        value: Any = None,
        suggestion: Optional[str] = None,
        file: Optional[str] = None,
        line: Optional[int] = None,
    ) -> None:
        self.rule, self.key, self.value, self.suggestion, self.file, self.line = rule, key, value, suggestion, file, line
        super().__init__(rule)

    def __str__(self) -> str:
        where = "" if self.file is None else (f"{self.file}:{self.line}: " if self.line else f"{self.file}: ")
        value = "" if self.value is None else f": {as_written(self.value)}"
        subject = "" if self.key is None else f"`{self.key}{value}`: "
        stop = "" if (self.suggestion or "").endswith("?") else "."
        tail = "" if not self.suggestion else f" {self.suggestion[0].upper()}{self.suggestion[1:]}{stop}"
        return f"{where}{subject}{self.rule}.{tail}"


def as_written(value: Any) -> str:
    """A value as a YAML file has it: `true`, `null`, `[1, false]`; text in quotes."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(as_written, value))}]"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else repr(value)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.55) -> Optional[str]:
    """The nearest of `known` to `word`, or None if nothing is near (`cutoff`: 1 for equal words only, as difflib counts)."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return near[0] if near else None
