"""`convert`, without logic of its own."""

from __future__ import annotations

import argparse
from typing import Any, Callable, Dict, Tuple

from ipu_lean.cli.verdicts import say

Summary = Dict[str, Any]
NAMES = ("convert",)
PAIRS: Tuple[str, ...] = ()


def convert(arguments: argparse.Namespace) -> Summary:
    """Read a Reformer or GPT-2 of Hugging Face's transformers into a run directory, or write a run as one."""
    from ipu_lean.train.convert import run_convert

    summary = run_convert(
        arguments.source, arguments.overrides, to=arguments.to, out=arguments.out, checkpoint=arguments.checkpoint, say=say
    )
    print(summary.pop("text"))
    return summary


def add_commands(commands: Any, command: Callable[..., Any]) -> None:
    """Add this file's parser; `command` is this room's way of adding one."""
    parser = command(commands, "convert", convert)
    parser.add_argument("source", metavar="SOURCE", help="a folder of transformers (config.json), or a run directory")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", default=[], help="values for the new run's config")
    parser.add_argument("--to", metavar="hf|run", help="the direction, to be sure; the other kind than SOURCE unless given")
    parser.add_argument("--out", metavar="DIR", help="the folder to be made; for a run directory runs/NAME-TIME unless given")
    parser.add_argument("--checkpoint", default="best", help="of a run: `best`, `last`, or the number of an update")
    parser.set_defaults(takes_overrides=True)
