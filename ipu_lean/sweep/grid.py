"""The trials of a sweep: one whole configuration each, alike in everything but the axes."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Sequence, Tuple

from ipu_lean.config import Config, SweepConfig, config_hash, derived, make_config
from ipu_lean.config.fields import field_at, is_section, keys_of, nearest
from ipu_lean.errors import ConfigError
from ipu_lean.train.banner import flat

WIDTH, DEPTH, LR, SEED, PARAMETRIZATION = "model.width", "model.depth", "optimizer.lr", "seed", "mup.parametrization"
NAMES = {WIDTH: "width", DEPTH: "depth", LR: "lr", SEED: "seed", PARAMETRIZATION: "parametrization"}
"""The axes that have flags and names of their own; any other axis is called by its key."""
FLAGS = {WIDTH: "--widths", DEPTH: "--depths", LR: "--lrs", SEED: "--seeds", PARAMETRIZATION: "--parametrizations"}
FIXED = {
    "batch": "trials are compared at one batch size",
    "data": "trials are compared on one text",
    "device": "trials are compared on one device",
    "logging": "it changes nothing that a trial computes",
    "model.classes": "trials are compared at one task",
    "model.head": "trials are compared at one task",
    "model.kind": "trials are compared within one architecture",
    "model.seq": "trials are compared at one context length",
    "model.vocab": "trials are compared with one vocabulary",
    "mup.base": "all trials share one base",
    "mup.base_depth": "all trials share one base",
    "mup.base_width": "all trials share one base",
    "name": "it changes nothing that a trial computes",
    "schedule.steps": "trials are compared over one horizon",
    "study": "a sweep has no studies inside",
    "sweep": "a sweep has no sweeps inside",
    "train.steps": "trials are compared after one number of updates",
}
"""What can be no axis, and why."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    `config`: all of it, without a `sweep` section. `axes`: this trial's value on every axis, by the names of `NAMES` (always
    width, depth, lr, seed and parametrization) or key path. `final_share`, `evaluate`: as in the `sweep` section.
    """

    config: Config
    axes: Dict[str, Any]
    final_share: float = 0.1
    evaluate: bool = False

    @property
    def id(self) -> str:
        """12 hex digits over everything that the result depends on, and not over who computes it."""
        parts = f"{config_hash(self.config)} {self.final_share!r} {self.evaluate}"
        return hashlib.sha256(parts.encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        """The axes for people: `mup width=64 depth=2 lr=2^-7 seed=0`."""
        words = [str(self.axes["parametrization"])]
        words += [f"{name}={lr_text(value) if name == 'lr' else value}" for name, value in self.axes.items()
                  if name != "parametrization"]
        return " ".join(words)


def lr_text(lr: float) -> str:
    """A learning rate; a power of two as 2^-7."""
    mantissa, exponent = lr.hex().split("p")
    return f"2^{int(exponent)}" if float.fromhex(mantissa + "p0") == 1.0 else f"{lr:.3g}"


def expand(config: Config, sweep: SweepConfig) -> List[Trial]:
    """All trials: parametrisations outermost, then depths, widths, the grid, learning rates, seeds.

    Raises:
        ConfigError: no axis at all; a key that can be no axis or is none; a trial that is no valid configuration (no muP base
            among others); trials that differ in something else than the axes, by name.
    """
    own = config.model_copy(update={"sweep": None, "study": None})
    axes: List[Tuple[str, Sequence[Any]]] = [
        (PARAMETRIZATION, sweep.parametrizations or [own.mup.parametrization]),
        (DEPTH, sweep.depths or [own.model.depth]),
        (WIDTH, sweep.widths or [own.model.width]),
    ]
    for key, values in sweep.grid.items():
        check_axis(key)
        axes.append((key, values))
    axes += [(LR, sweep.lrs or [own.optimizer.lr]), (SEED, sweep.seeds or [own.seed])]
    keys = [key for key, _ in axes]
    trials = []
    for values in itertools.product(*(values for _, values in axes)):
        named = {NAMES.get(key, key): value for key, value in zip(keys, values)}
        trials.append(Trial(_at(own, dict(zip(keys, values))), named, sweep.final_share, sweep.evaluate))
    check_alike(trials, keys)
    return trials


def extended(old: Config, new: Config) -> Config:
    """`new`, the configuration of a sweep that began as `old`, with every axis as the union of both: trials that ran stay part of
    it. An axis that `old` did not have had one value, the configuration's own.
    """
    before, after = old.sweep or SweepConfig(), new.sweep or SweepConfig()
    own = flat(old)
    axes: Dict[str, Any] = {}
    for key, flag in FLAGS.items():
        name = flag[2:]
        if getattr(before, name) != getattr(after, name):
            axes[name] = _union(getattr(before, name) or [own[key]], getattr(after, name) or [])
    grid = {**before.grid, **after.grid}
    for key in [key for key in grid if before.grid.get(key) != after.grid.get(key)]:
        grid[key] = _union(before.grid.get(key, [own[key]] if key in own else []), after.grid.get(key, []))
    tree = {**after.model_dump(mode="json"), **axes, "grid": grid}
    return new.model_copy(update={"sweep": SweepConfig(**tree)})


def _union(one: Sequence[Any], other: Sequence[Any]) -> List[Any]:
    """Each value once; numbers ascending, others in the order of their arrival."""
    found = list(one) + [value for value in other if value not in one]
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in found)
    return sorted(found) if numeric else found


def check_axis(key: str) -> None:
    """ConfigError unless `key` is a value that trials may differ in."""
    path = tuple(key.split("."))
    field = field_at(path)
    if key in FLAGS:
        raise ConfigError("this axis has a place of its own", key=key, suggestion=f"use {FLAGS[key]} (`sweep.{FLAGS[key][2:]}`)")
    for fixed, why in FIXED.items():
        if key == fixed or key.startswith(f"{fixed}."):
            raise ConfigError(f"this can be no axis of a sweep: {why}", key=key, suggestion="set one value for all trials")
    if field is None:
        near = nearest(path)
        raise ConfigError("there is no such key to sweep over" + (f" (did you mean `{near}`?)" if near else ""), key=key)
    if is_section(field.annotation) or keys_of(path):
        raise ConfigError("this is a section; an axis is a single key", key=key)


def check_alike(trials: Iterable[Trial], axes: Iterable[str]) -> None:
    """ConfigError, naming the key, if two trials differ in a key that is no axis. Sizes given as numbers belong to the width."""
    free = {*axes, *(["model.ffn_width", "model.axial.dims"] if WIDTH in axes else [])}
    first: Dict[str, Any] = {}
    for trial in trials:
        now = flat(trial.config)
        first = first or now
        for key in sorted(set(first) | set(now)):
            if key not in free and first.get(key) != now.get(key):
                raise ConfigError(
                    f"trials may differ in the axes only, and here one has {first.get(key)!r}",
                    key=key,
                    value=now.get(key),
                    suggestion="make it equal in all of them, or an axis",
                )


def put(tree: Dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key in a nested dict, in place. ConfigError if a section of it is not there (`mup.base` may be null)."""
    *sections, name = key.split(".")
    for depth, word in enumerate(sections, 1):
        tree = tree[word]
        if not isinstance(tree, dict):
            where = ".".join(sections[:depth])
            raise ConfigError(f"`{where}` is {tree!r}, so it has no {name} to set", key=key, suggestion=f"set {where} as a whole")
    tree[name] = value


def _at(config: Config, values: Dict[str, Any]) -> Config:
    """`config` with the axes at `values`, checked as a whole; a width scales what is written as a number with it."""
    tree = config.model_dump(mode="json")
    tree["model"] = derived.at_width(config.model, values[WIDTH]).model_dump(mode="json")
    try:
        for key, value in values.items():
            put(tree, key, value)
        return make_config(**tree)
    except ConfigError as error:
        where = ", ".join(f"{NAMES.get(key, key)} {value}" for key, value in values.items() if key not in (LR, SEED))
        error.rule = f"{error.rule} (in the trials with {where})"
        raise
