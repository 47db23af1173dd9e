"""Which trials may share a program: everything that the forward pass or the shape of a step reads must be equal."""

from __future__ import annotations

import json
from typing import Any, Dict, Iterator, Optional, Sequence, Tuple

from ipu_lean.config import Config, derived
from ipu_lean.config.layer_kinds import uses
from ipu_lean.sweep.grid import Trial

OPTIMIZERS = ("adamw", "adam", "sgd")
# Numbers of the update, or of the first weights: each trial keeps its own. Or nothing that a trial reads.
OWN = (
    "name",
    "seed",
    "optimizer.lr",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.momentum",
    "optimizer.nesterov",
    "optimizer.decay_vectors",
    "mup.decay",
    "mup.init_scale",
    "mup.embedding_std",
    "mup.readout_zero_init",
    "mup.query_zero_init",
    "schedule",
    "memory",
    "logging",
    "sweep",
    "data.cache",
    "train.clip",
    "train.compile",
    "train.threads",
    "train.eval_every",
    "train.save_every",
    "train.log_every",
    "train.keep_last",
    "train.keep_best",
    "train.sample",
)


def batchable(trials: Sequence[Trial]) -> Optional[str]:
    """None if these trials can be trained as one program, else the reason why not, naming the key."""
    reason = unfit(trials[0].config)
    if reason is not None:
        return reason
    first = dict(_leaves(trials[0].config))
    for trial in trials[1:]:
        other = dict(_leaves(trial.config))
        for key in [*first, *(key for key in other if key not in first)]:
            if first.get(key) != other.get(key):
                return f"`{key}` is {_text(first.get(key))} in one and {_text(other.get(key))} in another"
    return None


def unfit(config: Config) -> Optional[str]:
    """Why a trial cannot be trained together with any other, or None."""
    model = config.model
    if config.device != "cpu":
        return f"`device: {config.device}` trains one model at a time; only cpu trains them together"
    if config.precision != "fp32":
        return f"`precision: {config.precision}` would round unlike a trial of its own; only fp32 is trained together"
    if config.optimizer.kind not in OPTIMIZERS:
        return f"`optimizer.kind: {config.optimizer.kind}` updates one model at a time; {', '.join(OPTIMIZERS)} update many"
    for key in ("dropout", "attention_dropout", "embedding_dropout"):
        if getattr(model, key, 0.0):
            return f"`model.{key}: {getattr(model, key)}` draws from one stream of random numbers, which trials cannot share"
    if uses(model, "lsh"):
        return "`model.attention: lsh` hashes, and the last digit of one program can be another bucket in the other"
    if model.kind == "gpt" and model.stack.exact:
        return "`model.stack.exact` rounds to a grid, which turns the last digit of one program into a step of the other's"
    if config.memory.fused_update:
        return "`memory.fused_update` updates one model inside its own backward pass; trials together have one for all"
    if config.train.processes > 1:
        return "`train.processes` is more than one"
    return None


def program_key(config: Config) -> str:
    """Equal for two trials exactly if they can share a program (where they can at all)."""
    return json.dumps(sorted(_leaves(config)), sort_keys=True)


def _leaves(config: Config) -> Iterator[Tuple[str, Any]]:
    """(dotted key, value) of everything that must be equal, rules that follow from other keys resolved."""
    tree: Dict[str, Any] = config.model_dump(mode="json")
    yield "mup.depth_rule", derived.depth_mult(config)
    yield from ((key, value) for key, value in _walk(tree, "") if key not in ("mup.depth_rule", "mup.base_depth"))


def _walk(tree: Dict[str, Any], path: str) -> Iterator[Tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{path}{name}"
        if key in OWN:
            continue
        if isinstance(value, dict):
            yield from _walk(value, key + ".")
        else:
            yield key, value


def _text(value: Any) -> str:
    return "unset" if value is None else str(value)
