"""Text and images to batches: corpora, tokenizers, packed files, a sampler that resumes. numpy only, without torch."""
from __future__ import annotations

from ipu_lean.data.batches import IGNORED, TrainBatches, check_rows, check_vocab, check_windows, eval_batches, window_count
from ipu_lean.data.corpora import open_corpus, resolve
from ipu_lean.data.images import PreparedImages, prepare_images
from ipu_lean.data.labelled import PreparedTexts, expected_classes, prepare_labelled
from ipu_lean.data.masked import MaskedBatches, Masking, masked_eval_batches
from ipu_lean.data.prepare import Prepared, prepare
from ipu_lean.data.sampler import ResumableSampler
from ipu_lean.data.shapes import blank_batch, expected_features, expected_vocab
from ipu_lean.data.tokenizers import Tokenizer, load_tokenizer, train_tokenizer
from ipu_lean.data.tokens import TokenFile

__all__ = [
    "IGNORED",
    "MaskedBatches",
    "Masking",
    "Prepared",
    "PreparedImages",
    "PreparedTexts",
    "ResumableSampler",
    "TokenFile",
    "Tokenizer",
    "TrainBatches",
    "blank_batch",
    "check_rows",
    "check_vocab",
    "check_windows",
    "eval_batches",
    "expected_classes",
    "expected_features",
    "expected_vocab",
    "load_tokenizer",
    "masked_eval_batches",
    "open_corpus",
    "prepare",
    "prepare_images",
    "prepare_labelled",
    "resolve",
    "train_tokenizer",
    "window_count",
]
