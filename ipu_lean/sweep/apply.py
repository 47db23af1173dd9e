"""`sweep apply`: the configuration of the large run, with the learning rate that the sweep chose, and the reasons as comments."""

from __future__ import annotations

import math
import textwrap
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from ipu_lean.config import Config, Loaded, derived, load
from ipu_lean.config.show import as_yaml
from ipu_lean.config.yaml_text import to_text
from ipu_lean.data import expected_vocab
from ipu_lean.errors import ConfigError, RunError, VerdictFailed
from ipu_lean.models import build_meta
from ipu_lean.mup.transfer import Optimum
from ipu_lean.mup.verdict import FAIL, INCONCLUSIVE
from ipu_lean.sweep import judge
from ipu_lean.sweep.directory import SweepDirectory
from ipu_lean.sweep.grid import NAMES, expand, put
from ipu_lean.sweep.judge import Group
from ipu_lean.sweep.results import DONE, FAILED
from ipu_lean.train.banner import flat
from ipu_lean.train.resume import differing

SAME = ("model.", "mup.", "optimizer.")
"""Sections in which the large run differs from the trials in width, depth, learning rate and the axes' chosen values only."""


class Choice(NamedTuple):
    """A learning rate (a rate of the grid as it is, a parabola's vertex to three digits), where it comes from, and the values of
    the other axes that go with it.
    """

    lr: float
    group: Group
    optimum: Optimum
    settings: Dict[str, Any]


def run_apply(
    directory: str,
    width: Optional[int] = None,
    depth: Optional[int] = None,
    overrides: Sequence[str] = (),
    anyway: bool = False,
) -> str:
    """YAML text, which loads.

    Args:
        width, depth: of the large model; the sweep's own unless given. overrides: `key.path=value` of what may differ (steps,
            batch, data, device, …). anyway: write it although the transfer failed.

    Raises:
        ConfigError: no sweep, or a model that differs in more than width and depth. RunError: no trial has ended.
        VerdictFailed: the sweep found that the learning rate does not transfer.
    """
    run = SweepDirectory.reopen(directory)
    config = load(run.config).config
    trials = expand(config, config.sweep)
    results = {result.id: result for result in run.store.results([trial.id for trial in trials])}
    if not any(result.status == DONE for result in results.values()):
        raise RunError(f"no trial in {directory} has ended, so there is no learning rate to choose; run `ipu-lean sweep` first.")
    groups = judge.group_trials(trials, results)
    verdict, counted = judge.sweep_verdict(groups), judge.counts(trials, results)
    if verdict == FAIL and not anyway:
        reason = judge.worst(groups, FAIL)
        assert reason is not None
        raise VerdictFailed(f"{reason.text}. `--anyway` writes the configuration all the same.")
    choice = choose(groups)
    loaded = _large(config, choice, width, depth, overrides)
    notes = _notes(directory, config, loaded.config, choice, verdict, counted)
    return "\n".join(_comment(note) for note in notes) + "\n\n" + as_yaml(loaded, changed_only=True)


def choose(groups: Sequence[Group]) -> Choice:
    """The optimum of the largest model that has one, in the cell of the grid whose loss there is lowest. RunError if no
    trial under the parametrisation that decides has come to its end.
    """
    best: Optional[Choice] = None
    for group in judge.deciding(groups):
        ended = [one for one in group.optima if one.best_lr is not None]
        sure = [one for one in ended if one.log2_lr is not None]
        if not ended:
            continue
        one = sure[-1] if sure else ended[-1]
        lr = float(f"{2.0**one.log2_lr:.3g}") if one.log2_lr is not None else one.best_lr
        better = best is None or (one.log2_lr is not None, one.size, -one.loss) > (
            best.optimum.log2_lr is not None,
            best.optimum.size,
            -best.optimum.loss,
        )
        if better:
            best = Choice(lr, group, one, {**group.cell, "parametrization": group.parametrization})
    if best is None:
        names = " or ".join(sorted({group.parametrization for group in judge.deciding(groups)}))
        raise RunError(f"no trial under {names} has come to its end, so there is no learning rate to choose.")
    return best


def _large(config: Config, choice: Choice, width: Optional[int], depth: Optional[int], overrides: Sequence[str]) -> Loaded:
    """The trials' configuration at the new size, with the overrides on top."""
    size = {"width": config.model.width, "depth": config.model.depth}
    size.update({key: value for key, value in choice.settings.items() if key in size})
    size[choice.group.axis] = int(choice.optimum.size)
    size.update({key: value for key, value in (("width", width), ("depth", depth)) if value is not None})
    model = derived.at_width(config.model, size["width"]).model_copy(update={"depth": size["depth"]})
    tree = config.model_dump(mode="json")
    tree.update(sweep=None, model=model.model_dump(mode="json"), name=f"{config.name}-{size['width']}x{size['depth']}")
    tree["optimizer"]["lr"] = choice.lr
    tree["mup"]["parametrization"] = choice.settings["parametrization"]
    for key in _grid_keys(choice):
        put(tree, key, choice.settings[key])
    chosen = load(to_text(tree))
    final = load(to_text(tree), overrides)
    for key in differing(flat(chosen.config), flat(final.config)):
        if key.startswith(SAME):
            raise ConfigError(
                "the large run differs from the trials in width and depth only",
                key=key,
                value=flat(final.config).get(key),
                suggestion="sweep with this value, or use --width and --depth",
            )
    build_meta(final.config, expected_vocab(final.config))
    return Loaded(final.config, _origins(config, choice, final), final.text)


def _grid_keys(choice: Choice) -> List[str]:
    """The axes of the grid, by their keys."""
    return [key for key in choice.settings if key not in NAMES.values()]


def _origins(config: Config, choice: Choice, final: Loaded) -> Dict[str, str]:
    """Where each value of the large run comes from, for the comments."""
    before, after = flat(config), flat(final.config)
    how = "a rate of its grid" if choice.optimum.log2_lr is None else "vertex of the parabola, to three digits"
    names = {"optimizer.lr": f"chosen by the sweep ({how})", "mup.parametrization": "as judged"}
    names.update(dict.fromkeys(_grid_keys(choice), "the best value of the grid"))
    origins = {}
    for key in final.provenance:
        moved = before.get(key) != after.get(key)
        origins[key] = names.get(key, "the size of this run" if key.startswith("model.") and moved else "as in the sweep")
        if final.provenance[key] == "override":
            origins[key] = "for this run"
    return origins


def _notes(
    directory: str, config: Config, final: Config, choice: Choice, verdict: Optional[str], counted: Dict[str, int]
) -> List[str]:
    """What a reader of the file must know, a paragraph each."""
    group, one = choice.group, choice.optimum
    sizes = ", ".join(f"{found.size:g}" for found in group.optima)
    power = f"2^{math.log2(choice.lr):.2f}"
    how = f"vertex of the parabola, to three digits: {power}" if one.log2_lr is not None else "lowest loss of the grid"
    notes = [
        f"Written by `ipu-lean sweep apply {directory}`.",
        f"optimizer.lr {choice.lr!r} is the optimum at {group.axis} {one.size:g} ({how}) of a "
        f"sweep over {group.axis} {sizes} ({group.title}).",
    ]
    if one.log2_lr is None:
        notes.append(f"Beware: {one.problem}. Sweep more learning rates and apply again.")
    notes += [f"Verdict {said.name}: {said.status}: {said.text}." for said in group.verdicts]
    if verdict is None:
        notes.append("Beware: the sweep had one size only, so whether the learning rate transfers was not tested.")
    elif verdict in (FAIL, INCONCLUSIVE):
        notes.append(f"Beware: the verdict on the whole sweep is {verdict}.")
    for name, what in (("missing", "have not run yet"), (FAILED, "failed and are left out; `ipu-lean sweep --retry` runs them")):
        if counted[name]:
            notes.append(f"Beware: {counted[name]} of {counted['trials']} trials of the sweep {what}.")
    width = one.size if group.axis == "width" else choice.settings.get("width", config.model.width)
    if not derived.is_mup(final) and final.model.width != width:
        notes.append("Beware: under the standard parametrisation the best learning rate moves with the width.")
    if final.model.depth != config.model.depth and group.axis != "depth" and "depth" not in group.cell:
        notes.append(f"Beware: the sweep's trials had {config.model.depth} layers, and depth was not swept.")
    ignored = ("name", "logging.", "sweep", "model.width", "model.depth", "model.ffn_width", "optimizer.lr", *choice.settings)
    changed = [key for key in differing(flat(config), flat(final)) if not key.startswith(ignored)]
    changed = [key for key in changed if key != "mup.parametrization"]
    if changed:
        what = ", ".join(f"{key} ({flat(config).get(key)} there)" for key in changed)
        notes.append(f"Not as in the sweep: {what}. The learning rate transfers over width and depth; no more is promised.")
    return notes


def _comment(note: str) -> str:
    return "\n".join(textwrap.wrap(note, 118, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False))

