"""Texts with a class each: where they come from, how they are laid down, and batches of them."""
from __future__ import annotations

from ipu_lean.data.labelled.batches import ABSENT, LabelledBatches, TextSet, labelled_eval_batches
from ipu_lean.data.labelled.prepare import (
    PreparedTexts,
    expected_classes,
    labelled_fingerprint,
    prepare_labelled,
    prepare_other,
    reopen_labelled,
)
from ipu_lean.data.labelled.sources import absolute_labelled, labelled_classes, open_labelled

__all__ = [
    "ABSENT",
    "LabelledBatches",
    "PreparedTexts",
    "TextSet",
    "absolute_labelled",
    "expected_classes",
    "labelled_classes",
    "labelled_eval_batches",
    "labelled_fingerprint",
    "open_labelled",
    "prepare_labelled",
    "prepare_other",
    "reopen_labelled",
]
