"""Checkpoints: a directory each, written whole or not at all, and found again after a kill at any moment.

    checkpoints/step-00001000/{model.safetensors, optimizer.pt, roles.json, trainer.json, tokenizer/, manifest.json}
    checkpoints/last   checkpoints/best      one line each: the name of a directory

A checkpoint is written under a temporary name; every file is flushed; the manifest (SHA-256 of each file) comes last; then
one rename makes it visible. A reader trusts no name: it takes the newest directory whose manifest holds.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Callable, List, Optional

from ipu_lean.errors import CheckpointError, ConfigError
from ipu_lean.train.files import disk_guard, fsync_directory, remove_tree, write_atomic
from ipu_lean.train.snapshot import Snapshot, damage, write_files

_NAME = re.compile(r"step-(\d+)$")
_FLAG = "--checkpoint"
Say = Callable[[str], None]


def step_name(step: int) -> str:
    """Directory name of the checkpoint after `step` weight updates."""
    return f"step-{step:08d}"


class CheckpointStore:
    """The `checkpoints/` directory of one run. `say` receives remarks such as "last names a damaged checkpoint"."""

    def __init__(self, root: Path, say: Say = lambda text: None) -> None:
        self.root, self.say = Path(root), say

    # -- finding ---------------------------------------------------------------------------------------------------------
    def steps(self) -> List[int]:
        """Steps that have a directory, oldest first (whole or not)."""
        if not self.root.is_dir():
            return []
        found = (_NAME.match(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return sorted(int(match.group(1)) for match in found if match)

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` lies or will lie."""
        return self.root / step_name(step)

    def latest(self) -> Optional[Path]:
        """The newest whole checkpoint, None if there is none; says so when `last` names another one or a newer one is damaged."""
        named = self._pointer("last")
        for step in reversed(self.steps()):
            path = self.path(step)
            problem = damage(path)
            if problem:
                self.say(f"warning: checkpoint {path.name} is damaged ({problem}); looking for an older one.")
                continue
            if named != path.name:
                self.say(f"warning: `last` names {named or 'nothing'}; using {path.name}, the newest whole checkpoint.")
            return path
        return None

    def find(self, which: str) -> Path:
        """`last`, `best`, or a step number -> path of a whole checkpoint.

        Raises:
            CheckpointError: it is damaged, or there is none yet. ConfigError: no checkpoint of this run is called so.
        """
        if which == "last":
            path = self.latest()
            if path is None:
                raise CheckpointError(f"{self.root} holds no whole checkpoint; resume or restart the run to make one.")
            return path
        if which == "best":
            name = self._pointer("best")
            if name is None:
                raise CheckpointError(
                    f"{self.root} names no best checkpoint (train.keep_best was off, or no evaluation took place yet)."
                )
            path = self.root / name
        else:
            digits = which.replace("step-", "")
            if not digits.isdecimal():
                rule = "this is neither `best`, `last` nor a step number"
                raise ConfigError(rule, key=_FLAG, value=which, suggestion=self._have())
            path = self.path(int(digits))
        if not path.is_dir():
            raise ConfigError(f"{path} does not exist", key=_FLAG, value=which, suggestion=self._have())
        problem = damage(path)
        if problem:
            whole = any(damage(self.path(step)) is None for step in self.steps())
            hint = f" The newest whole checkpoint is used by `{_FLAG} last`." if whole else ""
            raise CheckpointError(f"checkpoint {path} is damaged: {problem}.{hint}")
        return path

    def _have(self) -> str:
        """The steps that could be asked for, in words."""
        return f"steps with a checkpoint: {', '.join(map(str, self.steps())) or 'none'}"

    def has_best(self) -> bool:
        """Whether a best checkpoint is marked and there."""
        name = self._pointer("best")
        return name is not None and (self.root / name).is_dir()

    def _pointer(self, name: str) -> Optional[str]:
        try:
            text = (self.root / name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return text if _NAME.match(text) else None

    # -- writing ---------------------------------------------------------------------------------------------------------
    def write(self, step: int, snapshot: Snapshot) -> Path:
        """Write the checkpoint of `step` and point `last` at it. RunError when the disk is full; older checkpoints stay
        as they are.
        """
        final = self.path(step)
        if final.is_dir() and damage(final) is None:
            # A resumed run came by here again: the same step of the same run, already on the disk.
            write_atomic(self.root / "last", final.name + "\n")
            return final
        temporary = self.root / f".tmp-{final.name}-{os.getpid()}"
        try:
            with disk_guard(f"checkpoint {final.name} was not written, the ones before it are untouched", self.root.parent):
                self.root.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                write_files(temporary, step, snapshot)
                if final.exists():
                    remove_tree(final)
                os.replace(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        fsync_directory(self.root)
        write_atomic(self.root / "last", final.name + "\n")
        return final

    def mark_best(self, step: int) -> None:
        """Point `best` at the checkpoint of `step`, which must be there."""
        write_atomic(self.root / "best", step_name(step) + "\n")

    def prune(self, keep_last: int, best: Optional[int]) -> List[int]:
        """Delete all but the newest `keep_last` and the best one; returns the deleted steps. Safe to kill at any moment."""
        steps = self.steps()
        keep = set(steps[len(steps) - max(1, keep_last) :]) | {best}
        gone = [step for step in steps if step not in keep]
        for step in gone:
            remove_tree(self.path(step))
        return gone

    def put_aside_after(self, source: Optional[Path]) -> None:
        """Rename checkpoints newer than `source`, which `latest` found damaged: they must not count as the newest ones
        any more.
        """
        limit = -1 if source is None else int(_NAME.match(source.name).group(1))
        for step in self.steps():
            if step > limit:
                aside = self.root / f"damaged-{step_name(step)}"
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(self.path(step), aside)
                self.say(f"warning: {step_name(step)} was renamed to {aside.name}.")

    def clean(self) -> None:
        """Remove what a killed process left half-written or half-deleted."""
        if self.root.is_dir():
            for entry in self.root.iterdir():
                if entry.name.startswith((".tmp-", ".trash-")):
                    shutil.rmtree(entry, ignore_errors=True)
                elif entry.name.startswith(".") and ".tmp-" in entry.name:
                    entry.unlink()
