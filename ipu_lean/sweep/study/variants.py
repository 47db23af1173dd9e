"""The variants of a study as trials: whole configurations that differ in what their variant names, and in the seed."""

from __future__ import annotations

from typing import Any, Dict, List

from ipu_lean.config import Config, StudyConfig, make_config
from ipu_lean.config.fields import field_at, nearest
from ipu_lean.errors import ConfigError
from ipu_lean.sweep.grid import Trial, put

SHARED = {
    "batch": "variants are compared at one batch size",
    "data": "variants read the same text in the same order",
    "device": "variants are compared on one device",
    "logging": "it changes nothing that a variant computes",
    "model.classes": "variants are compared at one task",
    "model.head": "variants are compared at one task",
    "model.kind": "variants are compared within one architecture",
    "model.seq": "variants read the same windows of text",
    "model.vocab": "variants are compared with one vocabulary",
    "name": "it changes nothing that a variant computes",
    "schedule.steps": "variants are compared over one horizon",
    "seed": "every variant is trained with the same seeds",
    "study": "a study has no studies inside",
    "sweep": "a study has no sweeps inside",
    "train.eval_batches": "variants are measured on the same text",
    "train.steps": "variants are compared after one number of updates",
}
"""What no variant may change, and why."""


def variants_of(config: Config) -> Dict[str, List[Trial]]:
    """The trials of each variant, one a seed.

    Raises:
        ConfigError: no variants, a key that a variant may not change or that does not exist, or a variant that is no valid
            configuration; the message names the variant.
    """
    study = config.study
    if study is None or not study.variants:
        raise ConfigError(
            "there is nothing to compare",
            key="study.variants",
            suggestion="give names and what they change, for example `study: {variants: {plain: {}, mean: {model.stack.coupling: "
            "mean}}}`",
        )
    check_expectations(study)
    found: Dict[str, List[Trial]] = {}
    for name, changes in study.variants.items():
        for key in changes:
            check_change(name, key)
        found[name] = [_trial(config, name, {**changes, "seed": seed}) for seed in study.seeds]
    return found


def check_expectations(study: StudyConfig) -> None:
    """ConfigError for a reference that is no variant, or an expectation that says nothing or contradicts itself."""
    if study.reference is not None and study.reference not in study.variants:
        raise ConfigError(
            "there is no such variant",
            key="study.reference",
            value=study.reference,
            suggestion=f"name one of {', '.join(study.variants)}",
        )
    for name, wanted in study.expect.items():
        key = f"study.expect.{name}"
        if study.reference is None:
            raise ConfigError("variants are expected to differ so much from a reference", key=key,
                              suggestion="name the variant that is meant as `study.reference`")  # fmt: skip
        if name not in study.variants or name == study.reference:
            others = ", ".join(other for other in study.variants if other != study.reference)
            raise ConfigError("this is no variant beside the reference", key=key, suggestion=f"the others are {others or 'none'}")
        if wanted.within is None and wanted.worse_by is None and wanted.norm_within is None:
            raise ConfigError("this expects nothing", key=key, suggestion="give `within`, `worse_by` or `norm_within`")
        if wanted.within is not None and wanted.worse_by is not None:
            raise ConfigError("a variant is expected to be alike or to be worse, not both", key=key,
                              suggestion="give `within` or `worse_by`")  # fmt: skip


def check_change(name: str, key: str) -> None:
    """ConfigError unless variants may differ in `key`."""
    where = f"study.variants.{name}.{key}"
    for shared, why in SHARED.items():
        if key == shared or key.startswith(f"{shared}.") or shared.startswith(f"{key}."):
            raise ConfigError(f"{key} is no variant's own: {why}", key=where, suggestion="set one value for all of them")
    if field_at(tuple(key.split("."))) is None:
        near = nearest(tuple(key.split(".")))
        raise ConfigError("there is no such key" + (f" (did you mean `{near}`?)" if near else ""), key=where)


def _trial(config: Config, name: str, changes: Dict[str, Any]) -> Trial:
    assert config.study is not None
    tree = config.model_copy(update={"sweep": None, "study": None}).model_dump(mode="json")
    try:
        for key, value in changes.items():
            put(tree, key, value)
        made = make_config(**tree)
    except ConfigError as error:
        error.rule = f"{error.rule} (in the variant {name})"
        raise
    return Trial(made, {"variant": name, "seed": changes["seed"]}, config.study.final_share, True)
