"""`sweep` and `sweep apply`, without logic of their own."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Callable, Dict, List, Tuple

from ipu_lean.cli.verdicts import print_verdict, say
from ipu_lean.errors import ConfigError

Summary = Dict[str, Any]
NAMES = ("sweep",)
PAIRS = ("sweep apply",)
AXES = ("widths", "depths", "lrs", "seeds", "parametrizations")


def sweep(arguments: argparse.Namespace) -> Summary:
    """Train a grid of small models and say whether their learning rate transfers (a sweep's directory: goes on with it)."""
    from ipu_lean.config import load
    from ipu_lean.sweep.directory import is_sweep, share_of

    source = arguments.config
    plain, grid = _split(arguments.overrides)
    loaded = load(source, [*plain, *_flags(arguments)])
    if grid:
        before = loaded.config.sweep.grid if loaded.config.sweep is not None else {}
        loaded = load(source, [*plain, *_flags(arguments), f"sweep.grid={json.dumps({**before, **grid})}"])
    options = {
        "share": None if arguments.share is None else share_of(arguments.share),
        "plan_only": arguments.plan,
        "strict": arguments.strict,
        "say": say,
    }
    if is_sweep(source):
        return _goes_on(arguments, loaded, source, options)
    if arguments.retry:
        raise ConfigError("only a sweep that has begun can be tried again", key="--retry", suggestion="name its directory")
    from ipu_lean.sweep.commands import run_sweep

    return print_verdict(lambda: run_sweep(loaded, arguments.out, **options))


def sweep_apply(arguments: argparse.Namespace) -> Summary:
    """Write the configuration of the large run, with the learning rate that a sweep chose."""
    from ipu_lean.sweep.apply import run_apply

    text = run_apply(arguments.run_directory, arguments.width, arguments.depth, arguments.overrides, arguments.anyway)
    print(text, end="")
    for line in text.splitlines():
        if line.startswith("# Beware"):
            print(f"ipu-lean: warning: {line[2:]}", file=sys.stderr)
    return {"schema": 1, "command": "sweep apply", "status": "ok", "verdict": None, "exit_code": 0, "yaml": text}


def _goes_on(arguments: argparse.Namespace, loaded: Any, source: str, options: Dict[str, Any]) -> Summary:
    from ipu_lean.sweep.commands import resume_sweep

    if arguments.out:
        raise ConfigError("a sweep goes on in its own directory", key="--out", value=arguments.out, suggestion="remove it")
    return print_verdict(lambda: resume_sweep(source, loaded, retry=arguments.retry, **options))


def _split(overrides: List[str]) -> Tuple[List[str], Dict[str, List[Any]]]:
    """Overrides of single values, and `key=[a,b]`, which makes the key an axis (a list of lists where one value is a list)."""
    from ipu_lean.config.fields import field_at, takes_list
    from ipu_lean.config.yaml_text import parse_value

    plain, grid = [], {}
    for override in overrides:
        key, equals, text = override.partition("=")
        value = parse_value(text) if equals and text.lstrip().startswith("[") else None
        axis = isinstance(value, list) and not key.startswith("sweep.") and field_at(tuple(key.split("."))) is not None
        if axis and takes_list(key):
            axis = bool(value) and all(isinstance(item, list) for item in value)
        if axis:
            grid[key] = value
        else:
            plain.append(override)
    return plain, grid


def _flags(arguments: argparse.Namespace) -> List[str]:
    """The flags as overrides of the `sweep` section."""
    found = []
    for name in AXES:
        value = getattr(arguments, name)
        if value is not None:
            found.append(f"sweep.{name}=[{value}]" if name == "parametrizations" else f"sweep.{name}={value}")
    for name in ("executor", "workers", "ray_address", "final_share"):
        if getattr(arguments, name) is not None:
            found.append(f"sweep.{name}={getattr(arguments, name)}")
    return found + (["sweep.evaluate=true"] if arguments.evaluate else [])


def add_commands(commands: Any, command: Callable[..., Any]) -> None:
    """Add this file's parsers; `command` is this room's way of adding one."""
    parser = command(commands, "sweep", sweep, "config")
    axis = "`32,64`, `32..256` (doubling), `A..B*4`, or `A..B/9` (9 evenly on a logarithmic scale); `2^-7` is a number"
    parser.add_argument("--widths", metavar="LIST", help=f"values of model.width: {axis}")
    parser.add_argument("--depths", metavar="LIST", help="values of model.depth")
    parser.add_argument("--lrs", metavar="LIST", help="values of optimizer.lr, such as 2^-10..2^-4")
    parser.add_argument("--seeds", metavar="N|LIST", help="how many seeds, or which (`0,7`)")
    parser.add_argument("--parametrizations", metavar="LIST", help="`mup,standard` shows both side by side")
    parser.add_argument("--executor", help="auto, sequential, local, batched or ray")
    parser.add_argument("--workers", type=int, help="worker processes (default 2)")
    parser.add_argument("--ray-address", metavar="ADDRESS", help="a running Ray cluster")
    parser.add_argument("--final-share", type=float, metavar="X", help="share of the last updates whose mean is the loss")
    parser.add_argument("--evaluate", action="store_true", help="measure the validation loss of every trial at its end")
    parser.add_argument("--out", metavar="DIR", help="where the sweep is kept; runs/NAME-sweep-TIME unless given")
    parser.add_argument("--retry", action="store_true", help="run again the trials that failed")
    parser.add_argument("--plan", action="store_true", help="make the directory and run nothing")
    parser.add_argument("--share", metavar="K/N", help="run every N-th trial from the K-th (0 to N-1) and judge nothing")
    parser.add_argument("--strict", action="store_true", help="an inconclusive verdict exits with 4 too")
    apply = command(commands, "sweep apply", sweep_apply, "run_directory")
    apply.add_argument("--width", type=int, help="width of the large model")
    apply.add_argument("--depth", type=int, help="depth of the large model")
    apply.add_argument("--anyway", action="store_true", help="even if the sweep found that the learning rate does not transfer")
