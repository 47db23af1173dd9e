"""Studies: named variants of one run on equal terms, ranked, with their curves, memory and speed."""

from __future__ import annotations

from ipu_lean.sweep.study.commands import resume_study, run_study
from ipu_lean.sweep.study.variants import variants_of

__all__ = ["resume_study", "run_study", "variants_of"]
