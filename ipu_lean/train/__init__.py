"""Training, evaluation and generation: engines, checkpoints, the loop, and the run directory."""

from __future__ import annotations

from ipu_lean.train.checkpoint import CheckpointStore
from ipu_lean.train.commands import run_resume, run_train
from ipu_lean.train.engines import Engine, PopTorchEngine, StepResult, TorchEngine, make_engine
from ipu_lean.train.generate import generate_ids
from ipu_lean.train.progress import Reporter
from ipu_lean.train.reuse import run_eval, run_generate
from ipu_lean.train.runs import RunDirectory
from ipu_lean.train.snapshot import Snapshot
from ipu_lean.train.world import World

__all__ = [
    "CheckpointStore",
    "Engine",
    "PopTorchEngine",
    "Reporter",
    "RunDirectory",
    "Snapshot",
    "StepResult",
    "TorchEngine",
    "World",
    "generate_ids",
    "make_engine",
    "run_eval",
    "run_generate",
    "run_resume",
    "run_train",
]
