"""What may change between the two halves of a run: how long it goes on, and how it is measured, saved and spread; never what it
computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from ipu_lean.config import Config, derived, load, load_config
from ipu_lean.errors import ConfigError
from ipu_lean.train.banner import flat

SAFE = (
    "name",
    "logging.",
    "train.steps",
    "train.eval_every",
    "train.eval_batches",
    "train.save_every",
    "train.keep_last",
    "train.keep_best",
    "train.log_every",
    "train.sample.",
    "train.threads",
    "train.processes",
    "train.strategy",
    "memory.fused_update",
    "data.cache",
    "device",
    "ipu.",
    "sweep",
)
"""Keys, and sections with a final dot, that a resumed run may change. Devices compute the same, up to rounding."""

FIXED = ("model.", "mup.", "data.tokenizer.")
"""What weights that no step has touched (`convert`) still decide; of these, only what is read in training may change."""
TRAINING_ONLY = ("model.dropout", "model.attention_dropout", "model.embedding_dropout")


def is_safe(key: str) -> bool:
    """Whether a resumed run may have another value there. `schedule.steps` is pinned by this module itself (see
    `resumed_config`).
    """
    return key == "schedule.steps" or covers(SAFE, key)


def covers(names: Sequence[str], key: str) -> bool:
    """Whether `key` is one of `names` or in a section among them (those end in a dot)."""
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)


def unsafe(then: Dict[str, Any], now: Dict[str, Any]) -> List[str]:
    """Keys in which a resumed run may not differ and does. A device brings its own 16 bits along: where the run changes devices,
    fp16-ipu may become fp32, and back.
    """
    moved = then.get("device") != now.get("device") and {then.get("precision"), now.get("precision")} == {"fp32", "fp16-ipu"}
    return [key for key in differing(then, now) if not is_safe(key) and not (moved and key == "precision")]


def differing(one: Dict[str, Any], other: Dict[str, Any]) -> List[str]:
    """Dotted keys whose values differ. A key that one of them lacks (it was written by another release) stands at its default."""
    default = flat(Config())
    keys = (set(one) | set(other)) & set(default)
    return sorted(key for key in keys if one.get(key, default[key]) != other.get(key, default[key]))


def begun_config(config_file: Path, overrides: Sequence[str]) -> Tuple[Config, List[str]]:
    """The same for a run whose weights no step has touched: everything may change that does not make them another model's."""
    old, new = load_config(config_file), load(config_file, overrides).config
    changed = differing(flat(old), flat(new))
    for key in changed:
        if covers(FIXED, key) and not covers(TRAINING_ONLY, key):
            raise ConfigError("the weights of this run belong to the model as it is", key=key, value=flat(new).get(key))
    return new, changed


def resumed_config(config_file: Path, overrides: Sequence[str]) -> Tuple[Config, List[str]]:
    """The run's config with safe overrides applied, and the keys that changed.

    More steps do not bend the schedule: if its horizon was train.steps, it is pinned to the old value, and the rate stays at
    `schedule.final` afterwards. So what was trained already is the beginning of the longer run.

    Raises:
        ConfigError: an override of a key that decides what is computed, or fewer steps than before.
    """
    old = load_config(config_file)
    new = load(config_file, overrides).config
    if new.data.cache is not None:  # the next command may be given from another folder
        place = str(Path(new.data.cache).expanduser().absolute())
        new = new.model_copy(update={"data": new.data.model_copy(update={"cache": place})})
    changed = differing(flat(old), flat(new))
    for key in [*unsafe(flat(old), flat(new)), *(key for key in changed if key == "schedule.steps")]:
        raise ConfigError(
            "a resumed run must compute what it began with, so this cannot change",
            key=key,
            value=flat(new).get(key),
            suggestion=f"start a new run; safe to change are {', '.join(name.rstrip('.') for name in SAFE)}",
        )
    if new.train.steps < old.train.steps:
        raise ConfigError(
            f"a resumed run can be lengthened, not shortened below its {old.train.steps} steps",
            key="train.steps",
            value=new.train.steps,
            suggestion="stop it with Ctrl-C where you like: it saves",
        )
    if new.train.steps > old.train.steps and old.schedule.steps is None:
        pinned = new.schedule.model_copy(update={"steps": derived.horizon(old)})
        new = new.model_copy(update={"schedule": pinned})
    return new, changed
