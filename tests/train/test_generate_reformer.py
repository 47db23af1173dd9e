"""Generation by models with local and hashed attention: the cache against brute force, rows against their own runs."""

from __future__ import annotations

from typing import Any, List

import pytest
import torch

from ipu_lean.config import make_config
from ipu_lean.errors import ConfigError
from ipu_lean.models import GPT, build_model
from ipu_lean.train.generate import generate_ids

pytestmark = pytest.mark.pod
SEQ, VOCAB = 48, 19
KINDS = {"local": {"chunk": 4}, "lsh": {"chunk": 4, "hashes": 2}}


def model_with(attention: Any, seed: int = 1, **changes: Any) -> GPT:
    kinds = [attention] if isinstance(attention, str) else attention
    sections = {kind: section for kind, section in KINDS.items() if kind in kinds}
    model = {"width": 16, "depth": 2 * len(kinds), "heads": 2, "seq": SEQ, "tied": False, "attention": attention, **sections}
    built = build_model(make_config(model={**model, **changes}, mup={"parametrization": "standard"}), 257)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return built.double().eval()


def prompt(length: int, step: int = 7) -> List[int]:
    return [(step * place + 3) % VOCAB for place in range(length)]


@torch.no_grad()
def brute_force(model: GPT, window: List[int], tokens: int) -> List[int]:
    """Greedy continuation, one full forward pass a token."""
    found: List[int] = []
    for _ in range(tokens):
        if len(window) > SEQ:
            window = window[-SEQ // 2 :]
        chosen = int(model.logits(torch.tensor([window]))[0, -1, :VOCAB].argmax())
        window, found = window + [chosen], found + [chosen]
    return found


@pytest.mark.parametrize("attention, positions", [("local", "axial"), ("local", "rotary"), (["full", "local"], "learned")])
@pytest.mark.parametrize("length", [1, 16, SEQ])
def test_local_and_full_attention_continue_as_without_a_cache(attention: Any, positions: str, length: int) -> None:
    variety = 0
    for seed in (1, 2, 3):
        model, counts = model_with(attention, seed, positions=positions), {}
        expected = brute_force(model, prompt(length), 40)
        variety = max(variety, len(set(expected)))
        found = generate_ids(model, [prompt(length)], 40, seq=SEQ, temperature=0, allowed=VOCAB, counts=counts)
        assert found == [expected]
        # The whole window is computed when it begins and each time it is full; everything else comes from the cache.
        assert counts["reused"] > 0 and counts["computed"] < 40 + length + 3 * SEQ // 2
    assert variety > 2, "one model at least was to say different things"


@torch.no_grad()
@pytest.mark.parametrize("attention", ["lsh", ["local", "lsh"], ["full", "lsh"]])
@pytest.mark.parametrize("length", [3, 4, 22, 47])
def test_hashed_attention_reads_the_prompt_as_without_a_cache(attention: Any, length: int) -> None:
    model = model_with(attention)
    tokens = torch.tensor([prompt(length), prompt(length, 5)])
    cache = model.new_cache(2)
    first, expected = model.logits(tokens, cache), model.logits(tokens)
    assert (first - expected).abs().max() <= 1e-12 * expected.abs().max()
    new = model.logits(torch.tensor([[1], [2]]), cache)
    assert new.isfinite().all() and cache.length == length + 1 and cache.reused == length


@torch.no_grad()
def test_within_one_chunk_hashed_attention_is_exact() -> None:
    model = model_with(["local", "lsh"], lsh={"chunk": 4, "full_below": SEQ})
    expected = brute_force(model, prompt(5), 30)
    assert generate_ids(model, [prompt(5)], 30, seq=SEQ, temperature=0, allowed=VOCAB) == [expected] and len(set(expected)) > 2


@pytest.mark.parametrize("attention", ["lsh", ["local", "lsh"], ["full", "local", "lsh"]])
def test_every_row_continues_as_it_would_alone(attention: Any) -> None:
    """Prompts of equal length share a batch, in which each row has buckets of its own."""
    model = model_with(attention)
    prompts = [prompt(9), prompt(9, 5), prompt(3), prompt(21)]
    together = generate_ids(model, prompts, 40, seq=SEQ, temperature=0, allowed=VOCAB)
    assert len({tuple(row) for row in together}) == len(prompts)
    for row, one in enumerate(prompts):
        assert generate_ids(model, [one], 40, seq=SEQ, temperature=0, allowed=VOCAB) == [together[row]]


@torch.no_grad()
def test_shared_layers_have_a_place_for_each_visit() -> None:
    model = model_with("local", num_hidden_groups=1, depth=3)
    expected = brute_force(model, prompt(6), 45)
    assert generate_ids(model, [prompt(6)], 45, seq=SEQ, temperature=0, allowed=VOCAB) == [expected]


def test_a_mask_of_tokens_does_not_go_with_a_cache() -> None:
    model = model_with("lsh")
    with pytest.raises(ConfigError, match="from left to right"):
        model.logits(torch.tensor([prompt(8)]), model.new_cache(1), present=torch.ones(1, 8, dtype=torch.bool))
