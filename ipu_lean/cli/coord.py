"""`coord-check`, without logic of its own."""

from __future__ import annotations

import argparse
from typing import Any, Callable, Dict, List, Tuple

from ipu_lean.cli.verdicts import print_verdict, say
from ipu_lean.errors import ConfigError

Summary = Dict[str, Any]
NAMES = ("coord-check",)
PAIRS: Tuple[str, ...] = ()
_DEVICES = ("cpu", "gpu", "ipu", "ipu-emulated")


def coord_check(arguments: argparse.Namespace) -> Summary:
    """Say whether activations and updates keep their size as the width grows, and if not, why."""
    from ipu_lean.config import load

    loaded = load(arguments.config, arguments.overrides)
    widths, depths = sizes(arguments.widths, "--widths"), sizes(arguments.depths, "--depths")
    from ipu_lean.sweep.coord.commands import run_coord_check

    return print_verdict(
        lambda: run_coord_check(
            loaded,
            widths,
            arguments.steps,
            arguments.seeds,
            arguments.lr,
            arguments.device,
            depths,
            arguments.out,
            strict=arguments.strict,
            say=say,
        )
    )


def sizes(text: Any, flag: str) -> Any:
    """`64,128,256` or `2..64` (doublings) as a list; None for None. ConfigError for anything else."""
    if text is None:
        return None
    first, dots, last = text.partition("..")
    try:
        if not dots:
            return [int(part) for part in text.replace(" ", "").split(",") if part]
        found: List[int] = [int(first)]
        while found[0] >= 1 and found[-1] * 2 <= int(last):
            found.append(found[-1] * 2)
        return found
    except ValueError:
        suggestion = "write 64,128,256, or 64..512 for doublings"
        raise ConfigError("these are whole numbers", key=flag, value=text, suggestion=suggestion) from None


def add_commands(commands: Any, command: Callable[..., Any]) -> None:
    """Add this file's parsers; `command` is the package's way of adding one."""
    parser = command(commands, "coord-check", coord_check, "config")
    widths = "three or more, such as 64,128,256 or 64..512 (doublings); 1, 2, 4 and 8 times the base unless given"
    parser.add_argument("--widths", metavar="N,N,...", help=widths)
    parser.add_argument("--steps", type=int, default=16, help="weight updates on one fixed batch (default 16)")
    parser.add_argument("--seeds", type=int, default=2, help="runs at every width (default 2)")
    parser.add_argument("--lr", type=float, help="peak learning rate; the configuration's unless given. Larger shows more")
    parser.add_argument("--device", choices=_DEVICES, help="where to train; the configuration's unless given")
    parser.add_argument("--depths", metavar="N,N,...", help="also check these depths, such as 2..64, at the narrowest width")
    parser.add_argument("--out", metavar="DIR", help="where the report is kept; runs/NAME-coord-check-TIME unless given")
    parser.add_argument("--strict", action="store_true", help="an inconclusive verdict exits with 4 too")
