"""`memory`, without logic of its own."""

from __future__ import annotations

import argparse
from typing import Any, Callable, Dict, Tuple

from ipu_lean.cli.verdicts import say

Summary = Dict[str, Any]
NAMES = ("memory",)
PAIRS: Tuple[str, ...] = ()


def memory(arguments: argparse.Namespace) -> Summary:
    """Bytes a parameter and of activations in every precision, predicted beside measured."""
    from ipu_lean.config import load

    loaded = load(arguments.config, arguments.overrides)
    from ipu_lean.train.memory.commands import run_memory

    modes = None if arguments.modes is None else [name for name in arguments.modes.replace(" ", "").split(",") if name]
    summary = run_memory(loaded, arguments.out, modes, predict=arguments.predict, say=say)
    print(summary.pop("table"))
    return summary


def add_commands(commands: Any, command: Callable[..., Any]) -> None:
    """Add this file's parser; `command` is the package's way of adding one."""
    parser = command(commands, "memory", memory, "config")
    parser.add_argument("--predict", action="store_true", help="formulas only: nothing is allocated, whatever the model's size")
    modes = "such as fp32,bf16-pure/kahan,bf16-pure/kahan+fused; all unless given"
    parser.add_argument("--modes", metavar="NAME,NAME,...", help=modes)
    parser.add_argument("--out", metavar="DIR", help="where the report is kept; runs/NAME-memory-TIME unless given")
