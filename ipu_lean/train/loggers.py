"""Where metrics go: metrics.jsonl always, metrics.csv unless switched off, TensorBoard and Weights & Biases only when asked.

Records: {"step", "split": "train", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "data_wait", "time"}   (tokens: trained
on so far)
         {"step", "split": NAME, "loss", "accuracy", "perplexity", "tokens", "time"}                             (tokens:
         counted in this evaluation)
Only the first process writes.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
from pathlib import Path
from typing import Any, Dict, List, Optional

from ipu_lean.config import Config
from ipu_lean.errors import EnvironmentProblem
from ipu_lean.train.files import disk_guard, finite, write_atomic
from ipu_lean.train.runs import RunDirectory

COLUMNS = ("step", "split", "loss", "accuracy", "perplexity", "lr", "grad_norm", "tokens", "tokens_per_s", "data_wait", "time")
_EXTRA = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


def check_loggers(config: Config) -> None:
    """EnvironmentProblem if a requested service's package is missing; asked before a run starts, imports nothing that is off."""
    for name in _requested(config):
        try:
            importlib.import_module(_EXTRA[name])
        except ImportError as error:
            raise EnvironmentProblem(
                f"`logging.{name}: true` needs a package that is not installed ({error}). Install it with `pip install "
                f"{name}`, or set `logging.{name}: false`."
            ) from error


def _requested(config: Config) -> List[str]:
    return [name for name in _EXTRA if getattr(config.logging, name)]


class MetricsLog:
    """Appends records, and forgets those after a checkpoint when a run goes on from it.

    Args:
        run: where the files lie.
        config: its `logging` section.
        step: the step that the run goes on from; records after it are removed.
    """

    def __init__(self, run: RunDirectory, config: Config, step: int) -> None:
        self._run = run
        kept = [record for record in read_metrics(run.metrics) if record["step"] <= step]
        write_atomic(run.metrics, "".join(_line(record) for record in kept))
        self._jsonl = open(run.metrics, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run
        self._csv: Optional[Any] = None
        if config.logging.csv:
            write_atomic(run.csv, _row(COLUMNS) + "".join(_row([record.get(name, "") for name in COLUMNS]) for record in kept))
            self._csv = open(run.csv, "a", encoding="utf-8", newline="")  # noqa: SIM115
        self._tensorboard = _open_tensorboard(run, step) if config.logging.tensorboard else None
        self._wandb = _open_wandb(run, config) if config.logging.wandb else None

    def write(self, record: Dict[str, Any]) -> None:
        """One record, at once in the files. RunError when the disk is full."""
        with disk_guard(f"a line of {self._run.metrics} was not written", self._run.path):
            self._jsonl.write(_line(record))
            self._jsonl.flush()
            if self._csv is not None:
                self._csv.write(_row([record.get(name, "") for name in COLUMNS]))
                self._csv.flush()
        numbers = {key: value for key, value in record.items() if key not in ("step", "split", "time") and value is not None}
        if self._tensorboard is not None:
            for key, value in numbers.items():
                self._tensorboard.add_scalar(f"{record['split']}/{key}", value, record["step"])
        if self._wandb is not None:
            self._wandb.log({f"{record['split']}/{key}": value for key, value in numbers.items()}, step=record["step"])

    def close(self) -> None:
        """Flush and close everything; safe to call twice."""
        for handle in (self._jsonl, self._csv, self._tensorboard):
            if handle is not None:
                handle.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._tensorboard = self._wandb = None


def read_metrics(path: Path) -> List[Dict[str, Any]]:
    """The records of a metrics.jsonl; a line cut short by a kill, and whatever follows it, is left out."""
    records: List[Dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return records
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict) or "step" not in record:
            break
        records.append(record)
    return records


def _line(record: Dict[str, Any]) -> str:
    return json.dumps(finite(record)) + "\n"


def _row(values: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(["" if value is None else value for value in values])
    return text.getvalue()


def _open_tensorboard(run: RunDirectory, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)


def _open_wandb(run: RunDirectory, config: Config) -> Any:
    """A resumed run continues its own page: the page's id is kept in the run directory."""
    import wandb

    note = run.path / "wandb_id.txt"
    known = note.read_text(encoding="utf-8").strip() if note.is_file() else None
    page = wandb.init(
        project=config.logging.wandb_project,
        name=run.path.name,
        dir=str(run.path),
        id=known,
        resume="allow" if known else None,
        config=config.model_dump(mode="json"),
    )
    if known is None:
        write_atomic(note, page.id + "\n")
    return page
