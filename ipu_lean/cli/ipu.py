"""The commands of the IPU path: `check`, `plan`, `compile`, `parity` and its two halves, without logic of their own."""

from __future__ import annotations

import argparse
from typing import Any, Callable, Dict, Sequence

from ipu_lean.cli.verdicts import print_verdict, say
from ipu_lean.errors import ConfigError

Summary = Dict[str, Any]
NAMES = ("check", "plan", "compile", "parity")
PAIRS = ("parity record", "parity compare")
_DEVICES = ("cpu", "gpu", "ipu", "ipu-emulated")


def check(arguments: argparse.Namespace) -> Summary:
    """Say what would not trace, place or batch on IPUs, and where."""
    from ipu_lean.config import load
    from ipu_lean.ipu.check import run_check

    return print_verdict(lambda: run_check(load(arguments.config, arguments.overrides)))


def plan(arguments: argparse.Namespace) -> Summary:
    """Say what every IPU would hold, whether it fits, and what to change first."""
    from ipu_lean.config import load
    from ipu_lean.ipu.plan.commands import run_auto, run_plan

    loaded = load(arguments.config, arguments.overrides)
    run = run_auto if arguments.auto else run_plan
    return print_verdict(lambda: run(loaded, arguments.pod, arguments.out, arguments.traced))


def compile_step(arguments: argparse.Namespace) -> Summary:
    """Compile the training step for IPUs and fill the executable cache, without training."""
    from ipu_lean.config import load
    from ipu_lean.train.compile import run_compile

    summary = run_compile(load(arguments.config, arguments.overrides), arguments.offline, say=say)
    print(summary.pop("table"))
    return summary


def parity(arguments: argparse.Namespace) -> Summary:
    """Train the same updates on two devices and say where they part."""
    from ipu_lean.config import load
    from ipu_lean.parity.commands import run_parity

    def run() -> Summary:
        return run_parity(
            load(arguments.config, arguments.overrides),
            arguments.reference,
            arguments.candidate,
            arguments.steps,
            arguments.out,
            tolerances=_tolerances(arguments.tolerance),
            as_initialised=arguments.as_initialised,
            strict=arguments.strict,
            say=say,
        )

    return print_verdict(run)


def parity_record(arguments: argparse.Namespace) -> Summary:
    """Train on one device and keep a trace for `parity compare`."""
    from ipu_lean.config import load
    from ipu_lean.parity.commands import run_record

    summary = run_record(
        load(arguments.config, arguments.overrides),
        arguments.device,
        arguments.out,
        arguments.steps,
        arguments.start,
        as_initialised=arguments.as_initialised,
        say=say,
    )
    print(f"trace of {summary['steps']} updates on {summary['device']}: {summary['artifacts']['trace']}")
    return summary


def parity_compare(arguments: argparse.Namespace) -> Summary:
    """Compare two recorded traces; the first is the reference."""
    from ipu_lean.parity.commands import run_compare

    def run() -> Summary:
        limits = _tolerances(arguments.tolerance)
        return run_compare(arguments.reference, arguments.candidate, arguments.out, tolerances=limits, strict=arguments.strict)

    return print_verdict(run)


def _tolerances(given: Sequence[str]) -> Dict[str, float]:
    found = {}
    for entry in given:
        name, _, value = entry.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError("a tolerance is given as name=number", key="--tolerance", value=entry) from None
    return found


def add_commands(commands: Any, command: Callable[..., Any]) -> None:
    """Add this file's parsers; `command` is this room's way of adding one."""
    command(commands, "check", check, "config")
    planning = command(commands, "plan", plan, "config")
    planning.add_argument("--pod", type=int, metavar="N", help="IPUs of the machine: as many replicas as there is room for")
    planning.add_argument("--auto", action="store_true", help="search the fastest plan that fits; --out keeps its config.yaml")
    planning.add_argument("--traced", action="store_true", help="also trace the step, and print the difference (takes seconds)")
    planning.add_argument("--out", metavar="DIR", help="keep table, picture and summary in this new directory")
    compiling = command(commands, "compile", compile_step, "config")
    compiling.add_argument("--offline", action="store_true", help="for IPUs that this machine does not have (needs the SDK)")
    both = command(commands, "parity", parity, "config")
    both.add_argument("--reference", choices=_DEVICES, default="cpu", help="what is taken for right (default cpu)")
    both.add_argument("--candidate", choices=_DEVICES, default="ipu-emulated", help="what is tested (default ipu-emulated)")
    both.add_argument("--out", metavar="DIR", help="where the report is kept; runs/NAME-parity-TIME unless given")
    one = command(commands, "parity record", parity_record, "config")
    one.add_argument("--device", choices=_DEVICES, help="where to train; the configuration's device unless given")
    one.add_argument("--out", metavar="DIR", required=True, help="where the trace is kept")
    one.add_argument("--start", metavar="DIR", help="begin with the weights and batches of this trace")
    for parser in (both, one):
        parser.add_argument("--steps", type=int, help="weight updates (default 20)")
        parser.add_argument("--as-initialised", action="store_true", help="leave matrices zero that muP starts at zero")
    two = command(commands, "parity compare", parity_compare)
    two.add_argument("reference", metavar="DIR1", help="the trace that is taken for right")
    two.add_argument("candidate", metavar="DIR2", help="the trace that is tested")
    two.add_argument("--out", metavar="DIR", help="where the report is kept; DIR2 unless given")
    for parser in (both, two):
        parser.add_argument("--strict", action="store_true", help="an inconclusive verdict exits with 4 too")
        parser.add_argument("--tolerance", metavar="NAME=NUMBER", action="append", default=[], help="activation, gradient, loss, "
                            "weight or zero; relative, instead of the precision's default")
