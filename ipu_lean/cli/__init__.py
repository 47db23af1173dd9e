"""The command line: one function per command, with no logic of its own, and one place that turns errors into exit codes.

Everything heavy is imported inside the functions, so `--help` costs nothing. Results go to stdout, everything else to stderr.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any, Callable, Dict, List, NoReturn, Optional, Sequence

from ipu_lean import __version__
from ipu_lean.cli import convert, coord, ipu, memory, study, sweep
from ipu_lean.cli.problems import known, quieten
from ipu_lean.errors import ConfigError, EnvironmentProblem, IpuLeanError, RunError, did_you_mean

Summary = Dict[str, Any]
Command = Callable[[argparse.Namespace], Summary]
SCHEMA = 1
ROOMS = (ipu, coord, sweep, study, memory, convert)
"""Modules that bring commands of their own: NAMES of them, `add_commands`, and the PAIRS that are written as two words."""


# --- commands ---


def train(arguments: argparse.Namespace) -> Summary:
    """Train a model."""
    from ipu_lean.config import load

    loaded = load(arguments.config, arguments.overrides)
    from ipu_lean.train import run_train  # seconds, which a mistake in the configuration does not wait for

    return run_train(loaded, arguments.out)


def resume(arguments: argparse.Namespace) -> Summary:
    """Continue a run from its last checkpoint, bit for bit."""
    from ipu_lean.train import run_resume

    return run_resume(arguments.run_directory, arguments.overrides)


def evaluate(arguments: argparse.Namespace) -> Summary:
    """Measure a run's checkpoint on its validation sets."""
    from ipu_lean.train import run_eval

    return run_eval(arguments.run_directory, arguments.overrides, checkpoint=arguments.checkpoint, data=arguments.data)


def generate(arguments: argparse.Namespace) -> Summary:
    """Continue a prompt with a run's checkpoint."""
    from ipu_lean.train import run_generate
    from ipu_lean.train.progress import printable

    arguments.prompts = arguments.prompts or [""]
    names = ("prompts", "samples", "tokens", "temperature", "top_k", "top_p", "seed", "checkpoint")
    summary = run_generate(arguments.run_directory, **{name: getattr(arguments, name) for name in names})
    text = summary["text"]
    print(printable(text) if sys.stdout.isatty() else text)
    return summary


def prepare(arguments: argparse.Namespace) -> Summary:
    """Turn the corpus (or the images) of a configuration into packed files."""
    from ipu_lean.config import load_config
    from ipu_lean.data import prepare as prepare_text
    from ipu_lean.data import prepare_images, prepare_labelled

    config = load_config(arguments.config, arguments.overrides)
    text = prepare_text if config.data.labelled is None else prepare_labelled
    prepared: Any = (text if config.data.images is None else prepare_images)(config, _progress)
    counts = {"train": len(prepared.train), **{name: len(tokens) for name, tokens in prepared.validation.items()}}
    for name, count in counts.items():
        print(f"{name}: {count:,} {prepared.unit}")
    print(f"{prepared.vocab:,} {prepared.what}, kept in {prepared.path}")
    metrics = {prepared.unit: counts, "vocab": prepared.vocab}
    return _summary("prepare", metrics=metrics, artifacts={prepared.unit: str(prepared.path)})


def explain(arguments: argparse.Namespace) -> Summary:
    """Print what muP makes of every tensor: role, initialisation, learning rate, decay, eps."""
    from ipu_lean.config import load_config
    from ipu_lean.data import expected_vocab
    from ipu_lean.models import build_meta
    from ipu_lean.mup import collapse_rows, format_table
    from ipu_lean.optim import explain_model

    config = load_config(arguments.config, arguments.overrides)
    model = build_meta(config, expected_vocab(config))
    rows = explain_model(model, config)
    print(format_table(rows if arguments.all else collapse_rows(rows)))
    return _summary("explain", metrics={"tensors": rows})


def doctor(arguments: argparse.Namespace) -> Summary:
    """Say what this machine has, what is broken and how to mend it."""
    from ipu_lean.config.doctor import BROKEN, as_json, default_cache, examine, format_report, this_machine

    findings = examine(this_machine(), default_cache())
    print(format_report(findings))
    broken = [finding.name for finding in findings if finding.status == BROKEN]
    metrics = {"findings": as_json(findings)}
    if not broken:
        return _summary("doctor", metrics=metrics)
    text = f"this machine cannot run ipu_lean as it is; broken: {', '.join(broken)}"
    print(f"ipu-lean: error: {text}", file=sys.stderr)
    return {**_summary("doctor", metrics=metrics), "status": "failed", "exit_code": EnvironmentProblem.exit_code, "error": text}


def config_show(arguments: argparse.Namespace) -> Summary:
    """Print every value of a configuration, marking what differs from the default and where it came from."""
    from ipu_lean.config import config_hash, load
    from ipu_lean.config.show import as_yaml, rows

    loaded = load(arguments.config, arguments.overrides)
    print(as_yaml(loaded, arguments.changed), end="")
    return _summary("config show", config_hash=config_hash(loaded.config), metrics={"values": rows(loaded)})


def config_schema(arguments: argparse.Namespace) -> Summary:
    """Print the JSON Schema of the configuration, for editors."""
    from ipu_lean.config.schema import json_schema

    schema = json_schema()
    print(json.dumps(schema, indent=2))
    return _summary("config schema", metrics={"schema": schema})


def _summary(command: str, **fields: Any) -> Summary:
    """The object of `--json` for commands that make no run directory."""
    return {"schema": SCHEMA, "command": command, "status": "ok", "verdict": None, "exit_code": 0, **fields}


def _progress(stage: str, done: int, total: Optional[int]) -> None:
    """One line that is redrawn on a terminal; silent elsewhere."""
    if sys.stderr.isatty():
        share = f"{100 * done / total:3.0f} %" if total else f"{done:,}"
        print(f"\r\033[K{stage}: {share}", end="\n" if total and done >= total else "", file=sys.stderr, flush=True)


# --- arguments ---


class _Parser(argparse.ArgumentParser):
    """argparse, with its complaints as ConfigError so that they look and count like every other mistake."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, suggestion=f"see `{self.prog} --help`")


def _command(commands: Any, name: str, run: Command, subject: str = "", overrides: bool = True) -> Any:
    """Adds one command; `subject` is `config`, `run_directory` or nothing."""
    about = (run.__doc__ or "").strip()
    parser = commands.add_parser(name, help=about[:1].lower() + about[1:].rstrip("."), description=about, allow_abbrev=False)
    if subject == "config":
        parser.add_argument("config", metavar="CONFIG", help="a YAML file, or a run directory (its config.yaml)")
    elif subject:
        parser.add_argument(subject, metavar="RUN", help="a run directory")
    if subject and overrides:
        parser.add_argument("overrides", metavar="key.path=value", nargs="*", default=[], help="values that win over the file's")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.set_defaults(run=run, command=name, takes_overrides=bool(subject) and overrides)
    return parser


def _build_parser() -> argparse.ArgumentParser:
    about = "Train lean (reversible, muP-initialised) transformers on CPU, GPU or IPU from one YAML."
    exits = "exit codes: 0 ok, 1 a run failed, 2 configuration, 3 environment, 4 a verdict failed, 130 interrupted"
    parser = _Parser(prog="ipu-lean", description=about, epilog=exits, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"ipu_lean {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    commands.required = True
    out = "where the run is kept; runs/NAME-TIME unless given, and never a directory that holds something"
    _command(commands, "train", train, "config").add_argument("--out", metavar="DIR", help=out)
    _command(commands, "resume", resume, "run_directory")
    checkpoint = "`best` (by the first validation set), `last`, or the number of an update"
    evaluation = _command(commands, "eval", evaluate, "run_directory")
    evaluation.add_argument("--checkpoint", default="best", help=checkpoint)
    evaluation.add_argument("--data", metavar="CORPUS", help="measure on this corpus (as data.corpus) instead")
    sampler = _command(commands, "generate", generate, "run_directory", overrides=False)
    sampler.add_argument("--prompt", dest="prompts", action="append", help="the text to continue; may be given several times")
    sampler.add_argument("--samples", type=int, default=1, help="continuations of each prompt (default 1)")
    sampler.add_argument("--tokens", type=int, default=200, help="tokens to generate (default 200)")
    sampler.add_argument("--temperature", type=float, default=0.8, help="divides the logits; 0 takes the likeliest (default 0.8)")
    sampler.add_argument("--top-k", type=int, default=None, help="draw among the K likeliest tokens only")
    sampler.add_argument("--top-p", type=float, default=None, help="draw among the likeliest tokens that hold this probability")
    sampler.add_argument("--seed", type=int, default=0, help="the same seed draws the same text (default 0)")
    sampler.add_argument("--checkpoint", default="best", help=checkpoint)
    _command(commands, "prepare", prepare, "config")
    every = "one row a tensor, instead of one a group of equal layers"
    _command(commands, "explain", explain, "config").add_argument("--all", action="store_true", help=every)
    for room in ROOMS:
        room.add_commands(commands, _command)
    _command(commands, "doctor", doctor)
    config = commands.add_parser("config", help="show a configuration, or the schema of all", allow_abbrev=False)
    actions = config.add_subparsers(metavar="show|schema", parser_class=_Parser)
    actions.required = True
    show = _command(actions, "show", config_show, "config")
    show.add_argument("--changed", action="store_true", help="only what differs from the defaults")
    show.set_defaults(command="config show")
    _command(actions, "schema", config_schema).set_defaults(command="config schema")
    return parser


COMMANDS = (
    *("train", "resume", "eval", "generate", "prepare", "explain"),
    *(name for room in ROOMS for name in room.NAMES),
    *("doctor", "config"),
)


def _join_words(argv: Sequence[str]) -> List[str]:
    """`parity record …` and its like as the one word that argparse knows them by."""
    words = list(argv)
    pair = " ".join(words[:2])
    return [pair, *words[2:]] if any(pair in room.PAIRS for room in ROOMS) else words


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; overrides may stand anywhere after the subject. Raises ConfigError."""
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        near = did_you_mean(argv[0], COMMANDS)
        rule = f"there is no command {argv[0]!r}" + (f" (did you mean `{near}`?)" if near else "")
        raise ConfigError(rule, suggestion=f"the commands are {', '.join(COMMANDS)}")
    arguments, rest = _build_parser().parse_known_args(_join_words(argv))
    foreign = [word for word in rest if word.startswith("-") or "=" not in word or not arguments.takes_overrides]
    if foreign:
        rule = f"`{arguments.command}` does not know {' '.join(foreign)}"
        raise ConfigError(rule, suggestion=f"see `ipu-lean {arguments.command} --help`")
    if arguments.takes_overrides:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


# --- running ---


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs one command and returns its exit code."""
    words: List[str] = list(sys.argv[1:] if argv is None else argv)
    quieten()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # text that this terminal's encoding has not ends no command
            stream.reconfigure(errors="backslashreplace")
    command = words[0] if words else None
    try:
        arguments = _parse(words)
        summary = arguments.run(arguments)
        if arguments.json:
            print(json.dumps(summary))
        sys.stdout.flush()
        return int(summary.get("exit_code", 0))
    except BrokenPipeError:
        # Nobody reads any more: say nothing, and keep Python from flushing into the closed pipe at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return RunError.exit_code
    except (Exception, KeyboardInterrupt) as error:
        problem = known(error)
        if problem is None:
            raise
        return _report(problem, command, as_json="--json" in words)


def _report(problem: IpuLeanError, command: Optional[str], as_json: bool) -> int:
    text = " ".join(str(problem).split())
    interrupted = problem.exit_code == 130
    print(f"ipu-lean: {text}" if interrupted else f"ipu-lean: error: {text}", file=sys.stderr)
    if as_json:
        status = "interrupted" if interrupted else "failed"
        outcome = {"command": command, "status": status, "exit_code": problem.exit_code, "error": text}
        print(json.dumps({**_summary(""), **outcome}), flush=True)
    return problem.exit_code
