"""Generation against brute force, against torch's own arithmetic, and with and without the cache."""

from __future__ import annotations

from pathlib import Path
from typing import List

import pytest
import torch

from ipu_lean.config import make_config
from ipu_lean.errors import CheckpointError, ConfigError
from ipu_lean.models import GPT, build_model
from ipu_lean.train import generate
from ipu_lean.train.generate import generate_ids, probabilities
from tests.train.helpers import sections

pytestmark = pytest.mark.pod
SEQ, VOCAB = 8, 19


def model_with(positions: str = "rotary", seed: int = 1) -> GPT:
    """A GPT with random readout and queries: zero ones would make every token equally likely."""
    parts = sections(Path(), model={"seq": SEQ, "positions": positions, "tied": False})
    model = build_model(make_config(**parts), 257)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
    return model.eval()


def brute_force(model: GPT, prompt: List[int], tokens: int) -> List[int]:
    """Greedy continuation by the documented window rule, one full forward pass a token."""
    window, found = prompt[-SEQ:], []
    for _ in range(tokens):
        if len(window) > SEQ:
            window = window[-SEQ // 2 :]
        with torch.no_grad():
            chosen = int(model.logits(torch.tensor([window]))[0, -1, :VOCAB].argmax())
        window, found = window + [chosen], found + [chosen]
    return found


@pytest.mark.parametrize("positions", ["rotary", "learned", "sinusoidal", "none"])
@pytest.mark.parametrize("length", [1, 5, SEQ, SEQ + 5])
def test_greedy_with_cache_equals_brute_force_beyond_the_context(positions: str, length: int) -> None:
    prompt = [(7 * place + 3) % VOCAB for place in range(length)]
    variety = 0
    for seed in range(4):
        model = model_with(positions, seed)
        expected = brute_force(model, prompt, 3 * SEQ)
        variety = max(variety, len(set(expected)))
        for cache in (True, False):
            assert generate_ids(model, [prompt], 3 * SEQ, seq=SEQ, temperature=0, cache=cache, allowed=VOCAB) == [expected]
    assert variety > 2, "one model at least was to say different things"


def test_sampling_is_the_same_with_cache_and_in_any_company() -> None:
    model = model_with()
    prompts = [[1, 2, 3], [4, 5, 6], [7], [4, 5, 6]]
    options = {"seq": SEQ, "temperature": 0.9, "top_k": 12, "top_p": 0.95, "seed": 5}
    together = generate_ids(model, prompts, 20, **options)
    assert together == generate_ids(model, prompts, 20, cache=False, **options)
    assert together[1] != together[3], "rows draw differently"
    for row, prompt in enumerate(prompts):
        assert generate_ids(model, [prompt], 20, **{**options, "seed": 5 + row}) == [together[row]]
    assert generate_ids(model, prompts, 20, **{**options, "seed": 6}) != together


def test_stops_at_the_end_token_and_leaves_it_out() -> None:
    model = model_with()
    whole = generate_ids(model, [[1, 2, 3]], 20, seq=SEQ, temperature=0, allowed=VOCAB)[0]
    end = whole[7]
    cut = whole[: whole.index(end)]
    assert generate_ids(model, [[1, 2, 3], [4, 5, 6]], 20, seq=SEQ, temperature=0, end=end, allowed=VOCAB)[0] == cut


def test_global_random_state_and_mode_are_left_alone() -> None:
    model = model_with().train()
    before = torch.get_rng_state()
    generate_ids(model, [[1]], 5, seq=SEQ, seed=3)
    assert torch.equal(before, torch.get_rng_state()) and model.training


def test_probabilities_by_hand() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0])
    plain = torch.softmax(logits.double() / 0.5, -1)
    assert torch.allclose(probabilities(logits, 0.5, None, None), plain)
    top = probabilities(logits, 1.0, 2, None)
    expected = torch.softmax(torch.tensor([2.0, 3.0], dtype=torch.float64), 0)
    assert torch.allclose(top[[0, 4]], expected) and float(top[[1, 2, 3]].sum()) == 0.0
    # Sorted probabilities are 0.636, 0.234, 0.086, …: 0.65 needs two tokens, 0.6 one, 0.9 three.
    for share, kept in ((0.6, {4}), (0.65, {4, 0}), (0.9, {4, 0, 1}), (1.0, {0, 1, 2, 3, 4})):
        found = probabilities(logits, 1.0, None, share)
        assert {index for index in range(5) if found[index] > 0} == kept
        assert float(found.sum()) == pytest.approx(1.0)


def test_top_k_and_top_p_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    for top_k, top_p, temperature in ((5, None, 1.0), (None, 0.7, 0.8), (20, 0.5, 1.3)):
        scores = logits / temperature
        if top_k is not None:
            scores = transformers.TopKLogitsWarper(top_k)(None, scores)
        if top_p is not None:
            scores = transformers.TopPLogitsWarper(top_p)(None, scores)
        assert torch.allclose(
            probabilities(logits[0], temperature, top_k, top_p).float(), torch.softmax(scores[0], -1), atol=1e-6
        )


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0])
    expected = torch.softmax(logits, -1)
    pick = generate._Picker(1.0, None, None, 0, None)
    counts = torch.bincount(torch.tensor([pick(logits) for _ in range(3000)]), minlength=3) / 3000
    assert torch.allclose(counts, expected, atol=0.03)


def test_refusals() -> None:
    model = model_with()
    for options in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(ConfigError):
            generate_ids(model, [[1]], 5, seq=SEQ, **options)
    with pytest.raises(ConfigError):
        generate_ids(model, [[1]], -1, seq=SEQ)
    with pytest.raises(ConfigError, match="nothing to continue"):
        generate_ids(model, [[]], 5, seq=SEQ)
    with pytest.raises(CheckpointError, match="do not belong together"):
        generate.check_vocabulary(100, 101)
    generate.check_vocabulary(128, 101)
