"""Continue text: one token at a time, with a cache of what attentions need again, greedy or sampled.

The context window. A model sees at most `seq` tokens. When the window is full, its older half is dropped and generation goes on
from the newer half, read anew. So a token's context has between seq/2 and seq tokens; each token costs one cached step, plus
one reading of seq/2 tokens every seq/2 tokens. The rule depends on lengths alone, which is why cached and uncached generation
agree (with hashed attention, or chunks ahead in local attention, they mean different things, see nn/attention/incremental.py).
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

import torch
from torch import nn

from ipu_lean.config import Config
from ipu_lean.errors import CheckpointError, ConfigError


def check_sampling(temperature: float, top_k: Optional[int], top_p: Optional[float], tokens: int) -> None:
    """ConfigError for a setting outside its range."""
    if not temperature >= 0:
        raise ConfigError("must be 0 (greedy) or more", key="--temperature", value=temperature)
    if top_k is not None and top_k < 1:
        raise ConfigError("must be 1 or more", key="--top-k", value=top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError("must lie above 0 and be at most 1", key="--top-p", value=top_p)
    if tokens < 0:
        raise ConfigError("must be 0 or more", key="--tokens", value=tokens)


def check_speaks(config: Config) -> None:
    """ConfigError for a model that predicts something else than the next token."""
    reasons = {
        "masked-lm": "this model finds hidden tokens from both sides, and there is nothing behind the one to come",
        "classifier": "this model tells classes of texts apart, and generates no text",
    }
    if config.model.head in reasons:
        raise ConfigError(reasons[config.model.head], key="model.head", value=config.model.head)


def check_vocabulary(model_vocab: int, tokenizer_vocab: int) -> None:
    """CheckpointError when the tokenizer makes ids for which the model has no row."""
    if tokenizer_vocab > model_vocab:
        raise CheckpointError(
            f"the tokenizer makes {tokenizer_vocab:,} different tokens, the model knows {model_vocab:,}: they do not belong "
            "together."
        )


def probabilities(logits: torch.Tensor, temperature: float, top_k: Optional[int], top_p: Optional[float]) -> torch.Tensor:
    """`[vocab]` logits -> `[vocab]` float64 probabilities: temperature, then the `top_k` likeliest, then the smallest set of
    likeliest tokens whose mass reaches `top_p` (Holtzman et al. 2020). Temperature must not be 0."""
    # Relative to the likeliest, so that no temperature above 0 overflows to infinity over infinity.
    scaled = (logits.double() - logits.max().double()) / max(temperature, 1e-300)
    if top_k is not None and top_k < scaled.numel():
        kept = torch.topk(scaled, top_k).indices
        masked = torch.full_like(scaled, -torch.inf)
        masked[kept] = scaled[kept]
        scaled = masked
    found = torch.softmax(scaled, -1)
    if top_p is not None and top_p < 1.0:
        ordered, order = torch.sort(found, descending=True, stable=True)
        # The token that crosses the threshold stays in.
        outside = ordered.cumsum(-1) - ordered >= top_p
        found = found.clone()
        found[order[outside]] = 0.0
        found = found / found.sum()
    return found


def generate_ids(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    seq: int,
    temperature: float = 1.0,
    top_k: Optional[int] = None,
    top_p: Optional[float] = None,
    seed: int = 0,
    end: Optional[int] = None,
    cache: bool = True,
    allowed: Optional[int] = None,
    counts: Optional[Dict[str, int]] = None,
) -> List[List[int]]:
    """New token ids for each prompt (the prompt is not repeated).

    Row i draws from its own generator, seeded with `seed + i`: what a prompt gets does not depend on what it shares a batch with.

    Args:
        model: `logits(tokens int [batch, n], cache=None, last=True) -> [batch, 1, vocab]` and `new_cache(batch, length)`.
        prompts: token ids, at least one each; of a prompt longer than `seq` the last `seq` are read.
        tokens: ids to generate for each prompt; fewer if `end` comes.
        seq: context length.
        temperature: 0 takes the likeliest token.
        end: stop a row after this id, which is left out of the result.
        cache: False recomputes the whole window for every token (slower; the same result, but see nn/attention/incremental.py).
        allowed: ids from here on are never chosen (rows of a padded vocabulary).
        counts: gets `computed` and `reused`, the positions that passes computed and those that they found in a cache.
    """
    check_sampling(temperature, top_k, top_p, tokens)
    if any(len(prompt) == 0 for prompt in prompts):
        raise ConfigError("an empty prompt gives nothing to continue", key="--prompt")
    results: List[List[int]] = [[] for _ in prompts]
    lengths: Dict[int, List[int]] = {}
    for index, prompt in enumerate(prompts):
        lengths.setdefault(min(len(prompt), seq), []).append(index)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for rows in lengths.values():
                pick = [_Picker(temperature, top_k, top_p, seed + row, allowed) for row in rows]
                found = _continue([list(prompts[row])[-seq:] for row in rows], tokens, model, seq, pick, end, cache, counts)
                for row, ids in zip(rows, found):
                    results[row] = ids
    finally:
        model.train(training)
    return results


def _continue(
    windows: List[List[int]],
    tokens: int,
    model: nn.Module,
    seq: int,
    pick: List[_Picker],
    end: Optional[int],
    use_cache: bool,
    counts: Optional[Dict[str, int]],
) -> List[List[int]]:
    """Rows of equal length, generated side by side until all have ended."""
    found: List[List[int]] = [[] for _ in windows]
    alive = [True] * len(windows)
    device = next(model.parameters()).device
    cache, read = None, 0
    for _ in range(tokens):
        if len(windows[0]) > seq:
            windows = [window[-max(1, seq // 2) :] for window in windows]
            cache = None
        if use_cache and cache is None:
            cache, read = model.new_cache(len(windows), seq), 0
        fresh = torch.tensor([window[read if use_cache else 0 :] for window in windows], dtype=torch.int64, device=device)
        if counts is not None:
            counts["computed"] = counts.get("computed", 0) + fresh.numel()
            counts["reused"] = counts.get("reused", 0) + (0 if cache is None else cache.length * len(windows))
        logits = model.logits(fresh, cache=cache, last=True)[:, -1].float()
        read = len(windows[0])
        for row, window in enumerate(windows):
            chosen = pick[row](logits[row])
            window.append(chosen)
            if alive[row]:
                alive[row] = chosen != end
                if alive[row]:
                    found[row].append(chosen)
        if not any(alive):
            break
    return found


class _Picker:
    """Chooses one row's next token."""

    def __init__(
        self, temperature: float, top_k: Optional[int], top_p: Optional[float], seed: int, allowed: Optional[int]
    ) -> None:
        self.temperature, self.top_k, self.top_p, self.allowed = temperature, top_k, top_p, allowed
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: torch.Tensor) -> int:
        logits = logits[: self.allowed].cpu()
        if self.temperature == 0:
            return int(torch.argmax(logits))
        found = probabilities(logits, self.temperature, self.top_k, self.top_p)
        return int(torch.multinomial(found, 1, generator=self.generator))
