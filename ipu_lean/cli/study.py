"""`study`, without logic of its own."""

from __future__ import annotations

import argparse
from typing import Any, Callable, Dict

from ipu_lean.cli.verdicts import print_verdict, say
from ipu_lean.errors import ConfigError

Summary = Dict[str, Any]
NAMES = ("study",)
PAIRS = ()


def study(arguments: argparse.Namespace) -> Summary:
    """Train named variants on equal terms and rank them (a study's directory: goes on with it)."""
    from ipu_lean.config import load

    overrides = list(arguments.overrides)
    if arguments.seeds is not None:
        overrides.append(f"study.seeds={arguments.seeds}")
    loaded = load(arguments.config, overrides)
    from ipu_lean.sweep.study.commands import is_study, run_study

    out = arguments.out
    if is_study(arguments.config):
        if out:
            raise ConfigError("a study goes on in its own directory", key="--out", value=out, suggestion="remove it")
        out = arguments.config
    elif arguments.retry and not is_study(out):
        raise ConfigError("only a study that has begun can be tried again", key="--retry", suggestion="name its directory")
    return print_verdict(lambda: run_study(loaded, out, retry=arguments.retry, strict=arguments.strict, say=say))


def add_commands(commands: Any, command: Callable[..., Any]) -> None:
    """Add this file's parser; `command` is this room's way of adding one."""
    parser = command(commands, "study", study, "config")
    parser.add_argument("--out", metavar="DIR", help="where it is kept; runs/NAME-study-TIME unless given")
    parser.add_argument("--seeds", type=int, metavar="N", help="train each variant with the seeds 0 to N-1")
    parser.add_argument("--retry", action="store_true", help="train again what failed")
    parser.add_argument("--strict", action="store_true", help="an inconclusive verdict fails as well")
