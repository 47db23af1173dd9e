"""What Ray's workers run in the tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Iterator, List, Optional, Tuple

from ipu_lean.errors import ConfigError
from ipu_lean.sweep.jobs import Job, iter_job


class Noting:
    """Real trials, one after another, each after a note of who begins it; the trial `fatal` kills its process."""

    def __init__(self, folder: Path, fatal: Optional[str] = None) -> None:
        self.folder, self.fatal = folder, fatal

    def note(self, trial: Any) -> None:
        """One line in the file of beginnings."""
        with open(self.folder / "begun", "a", encoding="ascii") as notes:
            notes.write(f"{os.getpid()} {trial.id}\n")

    def __call__(self, job: Any) -> Iterator[Any]:
        for trial in job:
            self.note(trial)
            if trial.id == self.fatal:
                time.sleep(1.0)  # so that what came before has been handed over
                os.kill(os.getpid(), signal.SIGKILL)
            yield from iter_job(Job([trial]), "ray")


class Sleeping(Noting):
    """A trial that does not end by itself."""

    def __call__(self, job: Any) -> Iterator[Any]:
        for trial in job:
            self.note(trial)
            time.sleep(600.0)
            yield trial


class Refusing:
    """A mistake that every trial shares."""

    def __call__(self, job: Any) -> Iterator[Any]:
        raise ConfigError("there is no such corpus", key="data.corpus", value="nowhere")
        yield  # a generator, like the others


def begun(folder: Path) -> List[Tuple[int, str]]:
    """(process, trial id) of every beginning so far."""
    path = folder / "begun"
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    return [(int(process), trial) for process, trial in (line.split() for line in lines)]
