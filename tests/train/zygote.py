"""A process that has imported everything and forks once per job: command lines in processes of their own, without the imports.

    with Zygote() as zygote:
        ended = zygote.run(["train", "tiny.yaml"], kill_at=17)      # SIGKILL at the 17th file operation of the run
        ended.code (negative: the signal), ended.out, ended.err

Run as a script this file is the server: one JSON job a line on stdin, one JSON answer a line on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[2]


class Ended(NamedTuple):
    """How a job ended."""

    code: int
    out: str
    err: str
    operations: int

    @property
    def summary(self) -> Dict[str, Any]:
        """The object that `--json` printed."""
        return json.loads(self.out.strip().splitlines()[-1])


class Zygote:
    """The client's side."""

    def __enter__(self) -> Zygote:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
            environment.pop(name, None)
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.stdin.close()
        self._server.wait(timeout=30)
        self._server.stdout.close()

    def run(
        self,
        argv: List[str],
        *,
        cwd: Optional[Path] = None,
        kill_at: Optional[int] = None,
        kill_after: Optional[float] = None,
        signals: Optional[List[Any]] = None,
        file_limit: Optional[int] = None,
        stdin: str = "",
        prelude: str = "",
    ) -> Ended:
        """Run one command line.

        Args:
            kill_at: SIGKILL in place of the so-manieth file operation (fsync, rename or unlink) in the process.
            kill_after: SIGKILL so many seconds after the start.
            signals: [(seconds after the first training step, signal number), …].
            file_limit: largest file that the process may write, in bytes (RLIMIT_FSIZE).
            prelude: Python to execute in the process first.
        """
        job = {
            "argv": [str(word) for word in argv],
            "cwd": str(cwd) if cwd else None,
            "kill_at": kill_at,
            "kill_after": kill_after,
            "signals": signals or [],
            "file_limit": file_limit,
            "stdin": stdin,
            "prelude": prelude,
        }
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the zygote died"
        return Ended(**json.loads(answer))


# --- the server's side ---


def serve() -> None:
    """Import, then fork for every line of stdin."""
    import matplotlib.figure  # noqa: F401
    import torch

    import ipu_lean.cli  # noqa: F401
    import ipu_lean.train.lit  # noqa: F401

    torch.set_num_threads(1)
    # Jobs print what they like; answers go to the real stdout alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in iter(sys.stdin.readline, ""):
        answers.write(json.dumps(_job(json.loads(line))) + "\n")
        answers.flush()


def _job(job: Dict[str, Any]) -> Dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        files = {name: os.path.join(folder, name) for name in ("out", "err", "in", "count", "began")}
        Path(files["in"]).write_text(job["stdin"], encoding="utf-8")
        Path(files["count"]).write_text("0")
        child = os.fork()
        if child == 0:
            _run(job, files)
        status = _watch(child, job, files)
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        out, err = (Path(files[name]).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
        return {"code": code, "out": out, "err": err, "operations": int(Path(files["count"]).read_text() or 0)}


def _watch(child: int, job: Dict[str, Any], files: Dict[str, str]) -> int:
    """Deliver signals while the child runs; its wait status."""
    started, began = time.monotonic(), None
    pending = [tuple(pair) for pair in job["signals"]]
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        now = time.monotonic()
        if began is None and os.path.exists(files["began"]):
            began = now
        if job["kill_after"] is not None and now - started > job["kill_after"]:
            os.kill(child, signal.SIGKILL)
        while pending and began is not None and now - began >= pending[0][0]:
            os.kill(child, pending.pop(0)[1])
        if now - started > 120:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def _run(job: Dict[str, Any], files: Dict[str, str]) -> None:
    """The child: arrange what the job asks for, run the command line, never return."""
    code = 70
    try:
        for number, name, flags in (
            (0, "in", os.O_RDONLY),
            (1, "out", os.O_WRONLY | os.O_CREAT),
            (2, "err", os.O_WRONLY | os.O_CREAT),
        ):
            os.dup2(os.open(files[name], flags, 0o600), number)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        if job["cwd"]:
            os.chdir(job["cwd"])
        if job["file_limit"] is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_limit"], job["file_limit"]))
        _count_operations(files["count"], job["kill_at"])
        _mark_first_step(files["began"])
        sys.argv = ["ipu-lean", *job["argv"]]
        exec(job["prelude"], {})
        from ipu_lean.cli import main

        code = main(job["argv"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _count_operations(note: str, kill_at: Optional[int]) -> None:
    """Count what makes files durable, visible or gone; die in place of number `kill_at`."""
    state = {"count": 0}
    handle = os.open(note, os.O_WRONLY)

    def wrapped(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            state["count"] += 1
            os.pwrite(handle, str(state["count"]).encode(), 0)
            if state["count"] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "rename", "unlink", "rmdir"):
        setattr(os, name, wrapped(getattr(os, name)))


def _mark_first_step(note: str) -> None:
    """Leave a file behind when the first training step is done."""
    from ipu_lean.train.loop import TrainLoop

    original = TrainLoop.advance

    def advance(self: Any) -> Any:
        result = original(self)
        if not os.path.exists(note):
            Path(note).touch()
        return result

    TrainLoop.advance = advance


if __name__ == "__main__":
    serve()
    os._exit(0)  # nothing is left to do that is worth the seconds that the libraries' own farewells take
