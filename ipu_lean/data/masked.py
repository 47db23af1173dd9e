"""Masked language modelling (Devlin et al. 2019): windows of a text in which some tokens are hidden, and are the labels."""
from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Optional

import numpy as np

from ipu_lean.data.batches import IGNORED, Batch, TrainBatches, check_windows, fill_rows
from ipu_lean.data.sampler import ResumableSampler
from ipu_lean.data.tokens import TokenFile
from ipu_lean.errors import CheckpointError, ConfigError

HIDDEN, RANDOM = 0.8, 0.9
"""Below HIDDEN a chosen token becomes the mask, from there below RANDOM a random token; else it stays as it is."""
TRAINING, VALIDATION = 1, 2


class Masking(NamedTuple):
    """How tokens are hidden.

    Attributes:
        vocab: ids of the tokenizer are 0 .. vocab - 1; the mask is the id vocab, which no text has.
        share: of the tokens of a window that become labels, the same number in every window, at least one.
    """

    vocab: int
    share: float

    def apply(self, windows: np.ndarray, places: np.ndarray, words: List[int]) -> Batch:
        """(inputs, labels), int32 `[rows, seq]` each: labels are the tokens where one was chosen, -100 elsewhere.

        What happens to a row depends on its `place` and on `words` alone, never on the rows beside it.

        Args:
            windows: int32 `[rows, seq]`, the text. places: `[rows]`, where each row stands in its stream.
            words: 32-bit numbers that tell one stream from another.
        """
        rows, seq = windows.shape
        draws, random = np.empty((rows, 3, seq)), np.random.RandomState(0)
        for row, place in enumerate(places):
            # RandomState's stream is frozen: the same masks under every release of numpy. Seeding one is faster than making it.
            random.seed([*words, int(place) & 0xFFFFFFFF, int(place) >> 32])
            draws[row] = random.random_sample((3, seq))
        count = max(1, int(round(self.share * seq)))
        chosen = np.argsort(draws[:, 0], axis=1, kind="stable")[:, :count]
        inputs, labels = windows.copy(), np.full_like(windows, IGNORED)
        original = np.take_along_axis(windows, chosen, 1)
        fate, other = (np.take_along_axis(draws[:, number], chosen, 1) for number in (1, 2))
        changed = np.where(fate < RANDOM, (other * self.vocab).astype(windows.dtype), original)
        np.put_along_axis(inputs, chosen, np.where(fate < HIDDEN, windows.dtype.type(self.vocab), changed), 1)
        np.put_along_axis(labels, chosen, original, 1)
        return inputs, labels


class MaskedBatches(TrainBatches):
    """An endless row of training batches; a window that comes again in a later epoch hides other tokens.

    The masks follow from the seed and from how many rows came before: a resumed run, and one with another batch, sees the same.

    Args:
        tokens, seq, rows, sampler: as `TrainBatches` has them; a window is `seq` tokens. masking: what is hidden.
    """

    def __init__(self, tokens: TokenFile, seq: int, rows: int, sampler: ResumableSampler, masking: Masking) -> None:
        super().__init__(tokens, seq, rows, sampler)
        self.masking = masking

    @classmethod
    def create(  # type: ignore[override]
        cls, tokens: TokenFile, seq: int, rows: int, masking: Masking, *, seed: int, shuffle: bool = True
    ) -> MaskedBatches:
        """The same with a sampler of the right length."""
        return cls(tokens, seq, rows, ResumableSampler(check_windows(len(tokens), seq, rows), seed, shuffle), masking)

    def next(self) -> Batch:
        """(tokens with some hidden, labels), each int32 `[rows, seq]`; labels are -100 where nothing was hidden."""
        sampler = self.sampler
        places = sampler.epoch * self.windows + sampler.position + np.arange(self.rows)
        window = self.tokens.windows(sampler.next(self.rows), self.seq)[:, :-1]
        return self.masking.apply(np.ascontiguousarray(window), places, [TRAINING, sampler.seed & 0xFFFFFFFF])

    def state_dict(self) -> Dict[str, Any]:
        """JSON-able: where the next batch begins."""
        return {**super().state_dict(), "mask_share": self.masking.share}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue after the last batch taken before `state_dict()`; CheckpointError if the windows are not the same."""
        if state.get("mask_share") != self.masking.share:
            raise CheckpointError(
                f"The saved data position hides a share of {state.get('mask_share')} of the tokens, data.mask_share is "
                f"{self.masking.share}: this run cannot be continued where it stood."
            )
        super().load_state_dict(state)


def check_whole_window(tokens: int, seq: int, key: str, value: object) -> None:
    """ConfigError for a validation set that is shorter than one window, whose end would stand in nothing."""
    if tokens < seq:
        raise ConfigError(
            f"a masked LM is measured on whole windows of model.seq = {seq:,} tokens, and this set has {tokens:,}",
            key=key,
            value=value,
            suggestion="use a longer text",
        )


def masked_eval_batches(
    tokens: TokenFile, seq: int, rows: int, masking: Masking, limit: Optional[int] = None
) -> Iterator[Batch]:
    """The text in order, window by window, with masks that are always the same; each token is a label at most once.

    The last window reaches back into the one before where the text's end does not fill it; what that one has counted is not
    hidden again. Every batch is int32 `[rows, seq]`; rows that the text does not fill have token 0, label -100.

    Args:
        limit: batches at most; None for the whole text.
    """
    windows = -(-len(tokens) // seq)
    batches = -(-windows // rows)
    for number in range(batches if limit is None else min(limit, batches)):
        places = np.arange(number * rows, min((number + 1) * rows, windows))
        starts = np.minimum(places * seq, len(tokens) - seq)
        text = np.stack([tokens.read(int(start), seq) for start in starts])
        inputs, labels = masking.apply(text, places, [VALIDATION])
        again = np.arange(seq) < (places * seq - starts)[:, None]
        inputs, labels = np.where(again, text, inputs), np.where(again, np.int32(IGNORED), labels)
        yield fill_rows(inputs, labels, rows)
