"""The pattern of slopes that a diagnosis reads: which are off, by how much, and which have been explained already."""
from __future__ import annotations

from typing import List, Optional, Sequence, Set

from ipu_lean.mup.figures import Figures, grouped
from ipu_lean.mup.judge import Finding, find

FAR = 0.35  # a slope is where another rule would put it if it is nearer than this


class Pattern:
    """The findings, with the few questions that rules ask of them, and what has been explained already."""

    def __init__(self, figures: Figures) -> None:
        self.figures = figures
        self.findings = find(figures)
        self.explained: Set[str] = set()

    def of(self, question: str, *kinds: str) -> List[Finding]:
        """Findings of a question that have a slope, of these kinds if any are given."""
        return [
            finding
            for finding in self.findings
            if finding.question == question and finding.slope is not None and (not kinds or finding.kind in kinds)
        ]

    def wrong(self, question: str, *kinds: str) -> List[Finding]:
        """Those that are off and unexplained so far."""
        if question in self.explained:
            return []
        return [finding for finding in self.of(question, *kinds) if not finding.ok]

    def near(self, findings: Sequence[Finding], excess: float) -> List[Finding]:
        """Those whose slope is `excess` above (below) what it should be."""
        return [finding for finding in findings if abs(finding.excess - excess) < FAR]

    def all_lost(self) -> bool:
        """Whether no learning rate follows the width: under Adam all hidden matrices' updates are one power too large, under SGD
        the rates of everything else are one power too small.
        """
        adam = self.figures.family == "adam"
        rows = [finding for finding in self.of("updates") if (finding.kind == "hidden" if adam else finding.expected > FAR)]
        return bool(rows) and len(self.near(rows, 1.0 if adam else -1.0)) == len(rows)

    def slow(self, findings: Sequence[Finding]) -> bool:
        """Whether the learning rates of these tensors themselves shrink more than muP's."""
        expected = {finding.subject: finding.expected for finding in self.of("updates")}
        built = {finding.subject: finding.expected for finding in self.of("rates")}
        names = [finding.subject for finding in findings if finding.subject in built]
        return any(built[name] < expected[name] - FAR for name in names)

    def explain(self, *questions: str) -> None:
        """These questions' failures are accounted for."""
        self.explained.update(questions)

    def multiplier(self) -> Optional[float]:
        """How many times smaller a hidden matrix's first update is than a vector's at the same update, at the narrowest width:
        the width multiplier that the optimizer has in fact. Adam only (its updates are as large as the rate).
        """
        if self.figures.family != "adam":
            return None
        rows = [row for row in self.figures.tensors if row.size == min(self.figures.sizes) and row.first]
        hidden = {finding.subject for finding in self.of("updates", "hidden")}
        vectors = {finding.subject for finding in self.of("updates", "vector")}
        ratios = []
        for step in grouped(rows, lambda row: str(row.first_step)).values():
            top = [row.first for row in step if row.name in hidden]
            bottom = [row.first for row in step if row.name in vectors]
            if top and bottom:
                ratios.append(max(bottom) / max(top))
        return ratios[0] if ratios else None
