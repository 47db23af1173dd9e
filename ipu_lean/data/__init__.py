"""Text and images to batches: corpora, tokenizers, packed files, a sampler that resumes. numpy only, without torch."""
from __future__ import annotations

from ipu_lean.data.batches import IGNORED, TrainBatches, check_vocab, check_windows, eval_batches, window_count
from ipu_lean.data.corpora import open_corpus, resolve
from ipu_lean.data.images import PreparedImages, prepare_images
from ipu_lean.data.prepare import Prepared, prepare
from ipu_lean.data.sampler import ResumableSampler
from ipu_lean.data.shapes import blank_batch, expected_features, expected_vocab
from ipu_lean.data.tokenizers import Tokenizer, load_tokenizer, train_tokenizer
from ipu_lean.data.tokens import TokenFile

__all__ = [
    "IGNORED",
    "Prepared",
    "PreparedImages",
    "ResumableSampler",
    "TokenFile",
    "Tokenizer",
    "TrainBatches",
    "blank_batch",
    "check_vocab",
    "check_windows",
    "eval_batches",
    "expected_features",
    "expected_vocab",
    "load_tokenizer",
    "open_corpus",
    "prepare",
    "prepare_images",
    "resolve",
    "train_tokenizer",
    "window_count",
]
