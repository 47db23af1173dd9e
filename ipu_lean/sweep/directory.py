"""A sweep's directory: config.yaml with its `sweep` section, the trials, and what is made of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable, Optional, Tuple

from ipu_lean.config import Config, config_hash, dump_config
from ipu_lean.errors import ConfigError, EnvironmentProblem, RunError
from ipu_lean.sweep.grid import FLAGS, check_axis
from ipu_lean.sweep.results import Store
from ipu_lean.train.files import disk_guard, write_atomic
from ipu_lean.train.runs import RunDirectory
from ipu_lean.train.tasks import Progress, Task, open_task


class SweepDirectory(RunDirectory):
    """Paths of one sweep; the lock keeps a second process from judging in it (shares need none)."""

    doing = "running the sweep in"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.store = Store(self.path)
        self.csv = self.path / "results.csv"
        self.table = self.path / "table.txt"
        self.plot = self.path / "transfer.png"
        self.steps = self.path / "steps.png"

    @classmethod
    def begin(cls, out: Optional[str], config: Config) -> SweepDirectory:
        """A new directory. ConfigError if `out` exists and is not empty."""
        run = cls(RunDirectory.create(out, f"{config.name}-sweep", dump_config(config)).path)
        run.store.directory.mkdir()
        return run

    @classmethod
    def reopen(cls, path: str) -> SweepDirectory:
        """An existing one. ConfigError if there is none."""
        run = cls(RunDirectory.open(path).path)
        if run.store.directory.is_dir() and run.made_by() == "study":
            raise ConfigError(f"{path} holds a study", key="RUN", suggestion=f"go on with it: `ipu-lean study {path}`")
        if not run.store.directory.is_dir():
            raise ConfigError(f"{path} holds no sweep", key="RUN", suggestion="name the directory of an `ipu-lean sweep`")
        return run

    def keep(self, config: Config) -> None:
        """Replace config.yaml, where the axes have changed."""
        write_atomic(self.config, dump_config(config))

    def task(self, config: Config, progress: Optional[Progress] = None) -> Task:
        """The data of all trials, the same as when the sweep began.

        Raises:
            RunError: the text has changed since then.
        """
        return task_of_all(self, config, "sweep", "trials", progress)


def task_of_all(run: RunDirectory, config: Config, what: str, members: str, progress: Optional[Progress] = None) -> Task:
    """The data of all `members` of a `what`, the same as when it began. RunError if the text has changed since then."""
    record = run.data if run.data.exists() else None
    task = open_task(config, progress, record)
    if record is not None and open_task(config).fingerprint() != task.fingerprint():
        raise RunError(
            f"the training text has changed since the {what} in {run.path} began, so its {members} could not be compared. Put "
            f"the old text back, or start a new {what}."
        )
    if record is None:
        task.note(run.data)
    return task


def try_to_write(needed: bool, what: str, *writes: Callable[[], Any]) -> Optional[EnvironmentProblem]:
    """Do what changes a directory, one after the other.

    Args:
        what: what is not done where it may not be written.
    Returns:
        Why it may not be written, or None if all is done.
    Raises:
        EnvironmentProblem: the same reason, where the writing is `needed`. RunError: the disk is full.
    """
    try:
        with disk_guard(what):
            for write in writes:
                write()
    except EnvironmentProblem as refusal:
        if needed:
            raise
        return refusal
    return None


def refusal_text(run: RunDirectory, refusal: EnvironmentProblem) -> str:
    """For the person who is shown what a directory holds that cannot be written."""
    reason = getattr(refusal.__cause__, "strerror", None) or refusal
    return f"warning: nothing could be written in {run.path} ({reason}); this is what it holds."


def is_sweep(path: str) -> bool:
    """Whether `path` is the directory of a sweep."""
    return os.path.isfile(os.path.join(path, "config.yaml")) and os.path.isdir(os.path.join(path, "trials"))


def check_same_base(
    old: Config,
    new: Config,
    what: str = "sweep",
    free: Tuple[str, ...] = ("name", "sweep", "study"),
    may: str = "only its axes, workers and name may change",
    instead: str = "make it an axis",
    check: Callable[[str], None] = check_axis,
) -> None:
    """A sweep may get other axes and workers, and nothing else: ConfigError otherwise (and likewise for another `what`).

    Args:
        instead: a way out for keys of which `check` raises no ConfigError (and for those that have a flag of their own).
    """
    from ipu_lean.train.banner import flat
    from ipu_lean.train.resume import differing

    if config_hash(old) == config_hash(new):
        return
    for key in differing(flat(old), flat(new)):
        if key not in free and not key.startswith("logging."):
            raise ConfigError(
                f"a {what} goes on with what it began with: {may}",
                key=key,
                value=flat(new).get(key),
                suggestion=f"start a new {what}" + (f", or {instead}" if _may_differ(key, check) else ""),
            )


def _may_differ(key: str, check: Callable[[str], None]) -> bool:
    try:
        check(key)
    except ConfigError:
        return check is check_axis and key in FLAGS
    return True


def share_of(text: str) -> Tuple[int, int]:
    """`3/16` as (3, 16): the fourth of sixteen parts. ConfigError for anything else."""
    first, slash, second = text.partition("/")
    if slash and first.strip().isdigit() and second.strip().isdigit() and int(first) < int(second):
        return int(first), int(second)
    raise ConfigError(
        "a share is written K/N with K from 0 to N-1", key="--share", value=text, suggestion="for example --share 0/16"
    )
