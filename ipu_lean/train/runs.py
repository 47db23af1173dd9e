"""The run directory: made once, never overwritten, enough by itself for `resume`, `eval` and `generate`.

config.yaml  data.json  metrics.jsonl  metrics.csv  checkpoints/  summary.json  loss.png  sample.txt
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from ipu_lean.config import load_config
from ipu_lean.config.layers import transformers_hint
from ipu_lean.errors import ConfigError, EnvironmentProblem, Interrupted, RunError
from ipu_lean.train.files import disk_guard, finite, read_json, remove_tree, write_atomic, write_json

SUMMARY_SCHEMA = 1
TRAINING = ("train", "resume", "convert")
"""Commands whose directories `resume` goes on with; `convert` leaves weights that no step has touched yet."""


class RunDirectory:
    """Paths of one run, and the lock that keeps a second process from training in it."""

    doing = "training in"  # what the process is at that holds the lock

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.csv = self.path / "metrics.csv"
        self.checkpoints = self.path / "checkpoints"
        self.summary = self.path / "summary.json"
        self.plot = self.path / "loss.png"
        self.sample = self.path / "sample.txt"
        self.data = self.path / "data.json"
        self._lock: Optional[Any] = None
        self._was_there = False

    @staticmethod
    def check_free(out: Optional[str]) -> None:
        """ConfigError if `out` exists and is not an empty directory, or lies where none can be; EnvironmentProblem if it may not
        be written.
        """
        _check_place(Path(out or "runs/any").absolute().parent)
        if not out or not os.path.lexists(out):
            return
        if not os.path.isdir(out):
            raise ConfigError(f"{out} is a file, and the output needs a directory", key="--out", suggestion="choose another name")
        if os.listdir(out):
            run = RunDirectory(Path(out))
            maker = run.made_by() if run.config.is_file() else None
            command = "resume" if maker in TRAINING else maker if (run.path / "trials").is_dir() else None
            hint = "choose another" + (f", or `ipu-lean {command} {shlex.quote(out)}`" if command else "")
            raise ConfigError(f"the output directory {out} exists and is not empty", key="--out", suggestion=hint)

    @classmethod
    def create(cls, out: Optional[str], name: str, config_text: str) -> RunDirectory:
        """A new directory that holds config.yaml. ConfigError if `out` exists and is not empty."""
        cls.check_free(out)
        path = (Path(out) if out else _free_name(name)).absolute()
        was_there = os.path.isdir(path)  # False for a name that is too long, of which `mkdir` tells
        # Filled beside its final place and renamed: a kill leaves no half-made run directory under the name that was asked for.
        temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        try:
            with disk_guard(f"the run directory {path} was not made"):
                temporary.mkdir(parents=True)
                write_atomic(temporary / "config.yaml", config_text)
                os.replace(temporary, path)
        except OSError as error:
            raise ConfigError(f"the output directory {path} cannot be made: {error.strerror}", key="--out") from error
        run = cls(path)
        run._was_there = was_there
        return run

    @contextlib.contextmanager
    def in_one_go(self, *own: str) -> Iterator[None]:
        """For a command that cannot go on with what it began in a directory it has just created: stopped by Ctrl-C inside the
        block, the directory is taken away, so that the same command can be given again.

        Args:
            own: names of what the command writes inside the block, beside config.yaml; with anything else in it the directory
                stays, and Interrupted says so.
        """
        try:
            yield
        except KeyboardInterrupt:
            foreign = self.withdraw(*own)
            if foreign:
                text = f"interrupted; {self.path} holds {', '.join(foreign)} and stays: give another --out."
                raise Interrupted(text) from None
            raise

    def withdraw(self, *own: str) -> List[str]:
        """Take the directory away that `create` has made; an empty one that was there before stays, empty.

        Args:
            own: names of what the command has written, beside config.yaml.

        Returns: names of anything else in it, because of which all of it stays.
        """
        foreign = sorted(set(os.listdir(self.path)) - {"config.yaml", *own})
        if not foreign:
            remove_tree(self.path)
            if self._was_there:
                self.path.mkdir()
        return foreign

    @classmethod
    def open(cls, path: str) -> RunDirectory:
        """An existing run directory; ConfigError when it is not one."""
        run = cls(Path(path).absolute())
        if not run.path.is_dir():
            raise ConfigError(f"there is no run directory {path}", key="RUN")
        if not run.config.is_file():
            suggestion = transformers_hint(run.path)
            raise ConfigError(f"{path} is not a run directory: it holds no config.yaml", key="RUN", suggestion=suggestion)
        return run

    def made_by(self) -> str:
        """The command that made the directory. A trace has no summary; without one that is whole (it was killed) it is `sweep` or
        `study` where trials are kept (a study has variants), else `train`, which can be resumed.
        """
        try:
            return str(json.loads(self.summary.read_text(encoding="utf-8"))["command"])
        except (OSError, ValueError, KeyError, TypeError):
            if (self.path / "manifest.json").is_file():
                return "parity record"
            if not (self.path / "trials").is_dir():
                return TRAINING[0]
        try:
            config = load_config(self.config)
        except ConfigError:
            return "sweep"
        return "study" if config.study is not None and config.sweep is None else "sweep"

    def check_trained(self) -> None:
        """ConfigError if the directory holds no checkpoints of a training, or of a model that was converted."""
        command = self.made_by()
        if command not in TRAINING:
            raise ConfigError(
                f"{self.path} was made by `{command}`, so there is no training to go on with",
                key="RUN",
                suggestion="name the directory of a `train`",
            )

    def lock(self) -> None:
        """Hold the directory until this process ends, however it ends; RunError if another live process holds it."""
        if self._lock is not None:
            return
        try:
            import fcntl
        except ImportError:  # Windows: no lock, and no harm either
            return
        handle = open(self.path / ".lock", "w")  # noqa: SIM115 - must stay open as long as the run
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            raise RunError(f"another process is {self.doing} {self.path}; stop it first, or wait for it.") from None
        except OSError:  # file systems without locks
            handle.close()
            return
        self._lock = handle

    def unlock(self) -> None:
        """Let others train here (also happens when the process ends)."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_summary(self, summary: Dict[str, Any]) -> None:
        """Replace summary.json in one step."""
        write_json(self.summary, summary)

    def read_summary(self) -> Optional[Dict[str, Any]]:
        """summary.json, or None if the run has not ended yet."""
        return read_json(self.summary)


def make_summary(
    command: str,
    *,
    device: str,
    config_hash: str,
    status: str = "ok",
    exit_code: int = 0,
    steps: int = 0,
    tokens: int = 0,
    seconds: float = 0.0,
    metrics: Optional[Dict[str, Any]] = None,
    artifacts: Optional[Dict[str, str]] = None,
    error: Optional[str] = None,
) -> Dict[str, Any]:
    """The object that `--json` prints and summary.json holds. `seconds`: this process only; `verdict`: null, these commands
    give none.
    """
    summary: Dict[str, Any] = {
        "schema": SUMMARY_SCHEMA,
        "command": command,
        "status": status,
        "verdict": None,
        "exit_code": exit_code,
        "device": device,
        "config_hash": config_hash,
        "steps": steps,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "metrics": finite(metrics or {}),
        "artifacts": artifacts or {},
    }
    if error is not None:
        summary["error"] = error
    return summary


def _check_place(folder: Path) -> None:
    """Asked before any work is done: whether a directory could be made in `folder`, which may itself be missing."""
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder, so the output directory cannot be made in it", key="--out")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EnvironmentProblem(f"no permission to write in {folder}, so the output directory cannot be made there.")


def _free_name(name: str) -> Path:
    """runs/NAME-TIME, with a number behind it when two runs start in the same second."""
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, count = base, 1
    while path.exists():
        count += 1
        path = base.with_name(f"{base.name}-{count}")
    return path
