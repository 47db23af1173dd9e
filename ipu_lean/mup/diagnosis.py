"""Which mistake makes such figures: from the pattern of slopes to the likely fault, by name. Knows no model.

Each rule reads one or two patterns that its fault leaves and that no other fault leaves together; the evidence is in
docs/coord-check.md. Rules are asked in order, and one that explains a pattern takes it away from those after it, so that a model
without any base is not called seven faults.
"""
from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence

from ipu_lean.mup.figures import Figures
from ipu_lean.mup.judge import SURE_GROWTH, Finding, find_depth
from ipu_lean.mup.pattern import Pattern
from ipu_lean.mup.verdict import signed


@dataclass(frozen=True)
class Diagnosis:
    """A likely fault: a short `code` for programs, and what to look at, for people."""

    code: str
    text: str

    def as_dict(self) -> Dict[str, Any]:
        return asdict(self)


Rule = Callable[[Pattern], Optional[Diagnosis]]


def diagnose(figures: Figures) -> List[Diagnosis]:
    """The likely faults, the weightiest first; empty where no rule finds anything."""
    pattern = Pattern(figures)
    return [found for found in (rule(pattern) for rule in RULES) if found is not None]


def _names(findings: Sequence[Finding]) -> str:
    names = list(dict.fromkeys(finding.subject for finding in findings))
    return ", ".join(f"`{name}`" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# --- the rules ---


def _no_base(pattern: Pattern) -> Optional[Diagnosis]:
    """All of optimizer, readout and attention behave as if no dimension grew, or as if the base grew along."""
    readout = pattern.near(pattern.wrong("readout"), 1.0)
    if not pattern.all_lost() or not readout or pattern.wrong("rates"):
        return None
    multiplier = pattern.multiplier()
    zero_starts = any(len(row.shape) > 1 and not row.init for row in pattern.figures.tensors)
    pattern.explain("updates", "readout", "scores", "changes", "decay")
    if multiplier is not None and abs(multiplier - 1.0) > 0.25:
        return Diagnosis(
            "moving-base",
            f"the base moves with the width: hidden matrices have a multiplier, but it is {multiplier:.2g} at every width. "
            "All widths of a sweep share one base; is it computed from the target (half its width, say)?",
        )
    if not zero_starts:
        pattern.explain("init")
        return Diagnosis(
            "standard-parametrization",
            "this is the standard parametrisation: neither learning rates nor readout nor attention follow the width, and no "
            "matrix starts at zero. Set `mup.parametrization: mup` and a base",
        )
    return Diagnosis(
        "no-base",
        "no dimension counts as growing: learning rates, readout and attention all have multiplier 1, as with base shapes of "
        "None or taken from the model itself. Give the base that the rates were tuned at",
    )


def _flattened(pattern: Pattern) -> Optional[Diagnosis]:
    """Built with the right ratios, which a scheduler overwrote."""
    wrong = pattern.wrong("rates")
    if not wrong:
        return None
    pattern.explain("rates", "updates", "changes", "decay")
    return Diagnosis(
        "flattened-schedule",
        "the optimizer was built with rates that follow the width, and something overwrote them: a scheduler that writes one "
        "rate into all groups (OneCycleLR, CyclicLR, a training loop) or has an absolute floor. Multiply each group's own "
        "initial rate",
    )


def _updates(pattern: Pattern) -> Optional[Diagnosis]:
    """Updates that are too large at large widths, or too small."""
    wrong = pattern.wrong("updates")
    matrices = [finding for finding in wrong if finding.kind != "vector"]
    if not matrices and not pattern.near(wrong, 1.0) and not pattern.near(wrong, -1.0):
        return None
    all_lost = pattern.all_lost()
    pattern.explain("updates", "changes", "decay")
    lost = pattern.near([finding for finding in matrices if finding.kind == "hidden"], 1.0)
    if all_lost:
        return Diagnosis(
            "lost-lr-groups",
            "learning rates do not follow the width (Adam: hidden matrices need 1/width; SGD: all others need the width). Is the "
            "optimizer built from plain model.parameters(), or were its groups merged?",
        )
    if lost:
        return Diagnosis(
            "lost-lr-group",
            f"{_names(lost)}: updated with one size at every width, while other hidden matrices shrink as 1/width. That module "
            "is in a wrong group of the optimizer (registered by name, added later, or created after the groups were made)",
        )
    return _small_updates(pattern, wrong, matrices)


def _small_updates(pattern: Pattern, wrong: Sequence[Finding], matrices: Sequence[Finding]) -> Diagnosis:
    low = [finding for finding in wrong if finding.excess < 0]
    if pattern.figures.family == "adam" and len(low) == len(wrong) and not pattern.slow(wrong):
        return Diagnosis(
            "eps-too-large",
            "updates shrink faster with the width than their learning rates do: gradients shrink as 1/width and fall below "
            "Adam's eps. Make eps smaller, and let it shrink with the width (build_optimizer does)",
        )
    hidden = pattern.near([finding for finding in matrices if finding.kind == "hidden"], -1.0)
    others = pattern.near([finding for finding in wrong if finding.kind != "hidden"], -1.0)
    if hidden and not others:
        return Diagnosis(
            "scaled-twice",
            f"{_names(hidden)}: updates shrink as 1/width^2. The learning rate is divided by the width twice (muP groups given "
            "to an optimizer that scales by fan-in itself, or a tensor as learning rate that groups share)",
        )
    if others and not hidden:
        return Diagnosis(
            "wrong-lr-group",
            f"{_names(others)}: updates shrink as 1/width, as only a hidden matrix's should. Its learning rate should not follow "
            "the width",
        )
    text = f"{_names(wrong)}: the size of updates does not scale as muP asks; compare the rates in `ipu-lean explain`"
    return Diagnosis("updates", text)


def _readout(pattern: Pattern) -> Optional[Diagnosis]:
    wrong = pattern.wrong("readout")
    if not wrong:
        return None
    pattern.explain("readout", "changes")
    if pattern.near(wrong, 1.0):
        return Diagnosis(
            "no-readout-multiplier",
            "the readout lacks its multiplier 1/width: logits of a readout that is not zero grow with the square root of the "
            "width. Use PopReadout with a base_width (`is_readout_layer`), not a plain linear layer",
        )
    text = f"the readout's multiplier should be 1/width, and its power of the width is {signed(wrong[0].excess)} above that"
    return Diagnosis("readout-multiplier", text)


def _init(pattern: Pattern) -> Optional[Diagnosis]:
    wrong = pattern.wrong("init")
    if not wrong:
        return None
    pattern.explain("init", "values", "scores", "changes")
    hidden = pattern.near([finding for finding in wrong if finding.kind == "hidden"], 0.5)
    if hidden:
        return Diagnosis(
            "constant-init",
            f"{_names(hidden)}: starts with one standard deviation at every width (0.02, say). A hidden matrix needs "
            "1/sqrt(fan-in)",
        )
    shrinking = pattern.near([finding for finding in wrong if finding.kind != "hidden"], -0.5)
    if shrinking:
        return Diagnosis(
            "fan-in-init",
            f"{_names(shrinking)}: starts ever smaller with the width, as Xavier's and Kaiming's rules make it. Embeddings, "
            "input layers and readouts (with a multiplier) start with one standard deviation at every width",
        )
    growing = pattern.near([finding for finding in wrong if finding.kind in ("embedding", "readout", "input")], 0.5)
    if growing:
        return Diagnosis(
            "growing-embedding",
            f"{_names(growing)}: starts ever larger, with the square root of the width: rescaled as a readout, although it is "
            "the embedding too (tied), or rescaled twice. It starts with one standard deviation at every width",
        )
    return Diagnosis("init", f"{_names(wrong)}: the standard deviation at the start does not scale as muP asks")


def _scores(pattern: Pattern) -> Optional[Diagnosis]:
    wrong = pattern.wrong("scores")
    if not wrong:
        return None
    pattern.explain("scores")
    if pattern.near(wrong, 0.5):
        return Diagnosis(
            "sqrt-attention",
            "attention scores are divided by the square root of the head size, which grows: muP divides by the head size. No "
            "other figure of this check shows it",
        )
    if pattern.near(wrong, -0.5):
        return Diagnosis(
            "fixed-head-attention",
            "attention scores shrink with the width although heads keep their size: 1/sqrt(head size) is right there",
        )
    return Diagnosis("attention", "attention scores do not scale with the head size as muP asks")


def _branches(pattern: Pattern) -> Optional[Diagnosis]:
    wrong = pattern.wrong("values")
    if not wrong or pattern.figures.few is not None:  # activations scatter: two sizes show no trend
        return None
    pattern.explain("values", "changes")
    return Diagnosis(
        "width-dependent-multiplier",
        f"{_names(wrong)}: with every weight started rightly, its output still has power {signed(wrong[0].excess)} of the width "
        "at the start: a multiplier (of the branch, the embedding, a scale) depends on the width",
    )


def _decay(pattern: Pattern) -> Optional[Diagnosis]:
    wrong = pattern.wrong("decay")
    if not wrong:
        return None
    pattern.explain("decay")
    return Diagnosis(
        "decay-not-compensated",
        f"{_names(wrong)}: the share that weight decay takes off has power {signed(wrong[0].excess)} of the width: learning rate "
        "x decay must not depend on it, so decay is multiplied where the learning rate is divided",
    )


def _changes(pattern: Pattern) -> Optional[Diagnosis]:
    grows = [finding for finding in pattern.wrong("changes") if finding.excess > SURE_GROWTH]
    if grows and pattern.figures.few is None:
        first = min(grows, key=lambda finding: finding.step)
        return Diagnosis(
            "unexplained-growth",
            f"`{first.subject}` is the first to change ever more with the width (step {first.step}), while rates, "
            "initialisation and multipliers look right: look for a scale in that module's forward pass",
        )
    steps = {finding.step for finding in pattern.findings if finding.question == "changes"}
    still = [
        finding
        for finding in pattern.findings
        if finding.question == "changes" and finding.slope is None and finding.step == max(steps)
    ]
    if still and not pattern.figures.diverged:
        return Diagnosis("frozen", f"{_names(still)}: does not change in training, at some width at least: frozen, or cut off")
    return None


RULES: Sequence[Rule] = (_flattened, _no_base, _updates, _readout, _init, _scores, _branches, _decay, _changes)


def diagnose_depth(figures: Figures) -> List[Diagnosis]:
    """The likely fault of runs at several depths; none where two show no trend."""
    if figures.few is not None:
        return []
    findings = [finding for finding in find_depth(figures) if finding.slope is not None]
    branches = [finding for finding in findings if finding.question == "branches" and not finding.ok]
    growing = [finding for finding in findings if finding.question == "depth" and finding.excess > SURE_GROWTH]
    if branches:
        power = signed(branches[0].slope or 0.0)
        text = (
            f"{_names(branches)}: what a branch adds has power {power} of the depth at the start, and CompleteP multiplies it by "
            "base depth / depth (-1): set `mup.depth_rule: completep`, and multiply each branch, not the skip"
        )
        return [Diagnosis("wrong-depth-multiplier", text)]
    if growing:
        text = f"`{growing[0].subject}` changes ever more with depth though branches start rightly: look at their learning rates"
        return [Diagnosis("unexplained-growth", text)]
    return []
