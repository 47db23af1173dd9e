"""What a trial came to, and the directory that keeps it: one small file a trial, whole or not there at all."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Set, Type

from ipu_lean.train.files import read_json, write_json

DONE, DIVERGED, FAILED = "done", "diverged", "failed"
_SCHEMA = 1


@dataclass(frozen=True)
class TrialResult:
    """One trial's outcome.

    Attributes:
        status: `done`; `diverged` (the loss was not finite, or far above its first value: a result too); `failed` (an error
            that says nothing about the learning rate).
        losses: training loss of each update that was made (nats per token).
        loss: mean of the last updates' losses; infinite unless `done`.
        valid: loss on each validation set at the end, where that was asked for.
        seconds: of this trial alone, or its share of a batch of trials.
        executor: who computed it.
        error: why it is not `done`.
    """

    id: str
    axes: Dict[str, Any]
    status: str
    losses: List[float]
    loss: float
    valid: Dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    executor: str = "sequential"
    error: Optional[str] = None

    def __post_init__(self) -> None:
        assert self.status in (DONE, DIVERGED, FAILED), self.status

    def as_json(self) -> Dict[str, Any]:
        """Plain JSON; numbers that are not finite become the strings `nan`, `inf`, `-inf`."""
        plain = asdict(self)
        plain["losses"] = [_out(value) for value in self.losses]
        plain["loss"] = _out(self.loss)
        plain["valid"] = {name: _out(value) for name, value in self.valid.items()}
        return {"schema": _SCHEMA, **plain}

    @classmethod
    def from_json(cls, plain: Dict[str, Any]) -> TrialResult:
        """What `as_json` gave. KeyError, TypeError or ValueError for anything else."""
        values = {name: plain[name] for name in cls.__dataclass_fields__}
        values["losses"] = [float(value) for value in plain["losses"]]
        values["loss"] = float(plain["loss"])
        values["valid"] = {name: float(value) for name, value in plain["valid"].items()}
        return cls(**values)


def _out(value: float) -> Any:
    return value if math.isfinite(value) else str(float(value))


def final_loss(losses: Sequence[float], share: float) -> float:
    """Mean over the last `share` of the updates, at least one."""
    count = max(1, int(round(share * len(losses))))
    return math.fsum(losses[-count:]) / count


class Store:
    """`trials/ID.json` in a sweep's directory. Several processes may add to it at once."""

    kind: Type[TrialResult] = TrialResult
    """What the files hold."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory) / "trials"

    def add(self, result: TrialResult) -> None:
        """Keep a result; on the disk when this returns, and never half of it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        write_json(self.directory / f"{result.id}.json", result.as_json())

    def check_writable(self) -> None:
        """OSError if results cannot be added; asked before the first one is computed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=str(self.directory)):
            pass

    def get(self, trial_id: str) -> Optional[TrialResult]:
        """The result of a trial, or None while there is none that can be read."""
        plain = read_json(self.directory / f"{trial_id}.json")
        try:
            return None if plain is None else self.kind.from_json(plain)
        except (KeyError, TypeError, ValueError):
            return None

    def results(self, ids: Iterable[str]) -> List[TrialResult]:
        """Those that are there, in the order of `ids`."""
        return [result for result in map(self.get, ids) if result is not None]

    def done_ids(self, retry: bool = False) -> Set[str]:
        """Trials that need not run: every one with a result, or, with `retry`, every one that did not fail."""
        if not self.directory.is_dir():
            return set()
        names = [name[:-5] for name in os.listdir(self.directory) if name.endswith(".json") and not name.startswith(".")]
        return {result.id for result in self.results(names) if not (retry and result.status == FAILED)}
