"""Variants beside the reference, seed by seed, and whether that is what `study.expect` says."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

from ipu_lean.config import StudyConfig
from ipu_lean.mup.verdict import FAIL, INCONCLUSIVE, PASS, Verdict
from ipu_lean.sweep.results import DONE
from ipu_lean.sweep.study.result import VariantResult, score


@dataclass(frozen=True)
class Comparison:
    """A variant beside the reference, over the seeds with which both came to their end.

    Attributes:
        seeds: how many those are. reference: mean loss of the reference with them. difference: mean of (loss of the variant -
            loss of the reference), each with the same seed. spread: largest minus smallest of these differences; None with one
            seed.
        norm: the largest | norm of the weights / the reference's - 1 |; None where it was not measured.
    """

    seeds: int
    reference: float
    difference: float
    spread: Optional[float]
    norm: Optional[float]

    @property
    def relative(self) -> float:
        """The mean difference as a share of the reference's loss."""
        return self.difference / self.reference

    @property
    def relative_spread(self) -> Optional[float]:
        """The spread as a share of the reference's loss; None with one seed."""
        return None if self.spread is None else self.spread / self.reference


def compare(variant: Sequence[VariantResult], reference: Sequence[VariantResult]) -> Optional[Comparison]:
    """The variant's results beside the reference's; None if there is no seed with which both came to their end."""
    theirs: Dict[int, VariantResult] = {result.axes["seed"]: result for result in reference if result.status == DONE}
    pairs = [(r, theirs[r.axes["seed"]]) for r in variant if r.status == DONE and r.axes["seed"] in theirs]
    if not pairs:
        return None
    differences = [score(one) - score(other) for one, other in pairs]
    norms = [abs(a.weight_norm / b.weight_norm - 1) for a, b in pairs if a.weight_norm is not None and b.weight_norm]
    return Comparison(
        len(pairs),
        statistics.mean(score(other) for _, other in pairs),
        statistics.mean(differences),
        max(differences) - min(differences) if len(differences) > 1 else None,
        max(norms) if len(norms) == len(pairs) else None,
    )


def judge(study: StudyConfig, comparisons: Dict[str, Optional[Comparison]]) -> List[Verdict]:
    """One verdict for each expectation of each variant; inconclusive where a seed is missing."""
    found: List[Verdict] = []
    for name, wanted in study.expect.items():
        one = comparisons.get(name)
        if wanted.within is not None:
            found.append(_within(name, one, wanted.within, study))
        if wanted.worse_by is not None:
            found.append(_worse(name, one, wanted.worse_by, study))
        if wanted.norm_within is not None:
            found.append(_norm(name, one, wanted.norm_within, study))
    return found


def _missing(one: Optional[Comparison], study: StudyConfig) -> Optional[str]:
    if one is None or one.seeds < len(study.seeds):
        return f"{0 if one is None else one.seeds} of {len(study.seeds)} seeds came to their end beside {study.reference}"
    return None


def _within(name: str, one: Optional[Comparison], share: float, study: StudyConfig) -> Verdict:
    question, missing = f"{name} as good as {study.reference}", _missing(one, study)
    if one is None or missing is not None:
        return Verdict(question, INCONCLUSIVE, None, share, str(missing))
    spread = one.relative_spread
    limit = share if spread is None else max(share, spread)
    text = f"the loss differs by {one.relative:+.3%}"
    text += " with one seed, so without a spread" if spread is None else f" on average, {spread:.3%} between seeds"
    return Verdict(question, PASS if abs(one.relative) <= limit else FAIL, abs(one.relative), limit, text)


def _worse(name: str, one: Optional[Comparison], share: float, study: StudyConfig) -> Verdict:
    question, missing = f"{name} worse than {study.reference}", _missing(one, study)
    if one is None or missing is not None:
        return Verdict(question, INCONCLUSIVE, None, share, str(missing))
    text = f"the loss is {one.relative:+.3%} higher on average"
    return Verdict(question, PASS if one.relative >= share else FAIL, one.relative, share, text)


def _norm(name: str, one: Optional[Comparison], share: float, study: StudyConfig) -> Verdict:
    question, missing = f"weights of {name} as large as those of {study.reference}", _missing(one, study)
    if one is None or missing is not None or one.norm is None:
        return Verdict(question, INCONCLUSIVE, None, share, missing or "the norm of the weights was not measured")
    text = f"the norm of the weights differs by at most {one.norm:.3%}"
    return Verdict(question, PASS if one.norm <= share else FAIL, one.norm, share, text)
