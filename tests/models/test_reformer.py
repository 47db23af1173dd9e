"""A GPT with hashed and local attention: reversible in every case, with sequences of any length."""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch

from ipu_lean._compat import TORCH
from ipu_lean.errors import ConfigError
from ipu_lean.models import TrainStep, build_meta
from ipu_lean.models.reformer import hashing
from tests.models.common import config_of, tokens_for
from tests.models.reformer_common import LAYERS, gradients, reformer, worst

pytestmark = pytest.mark.pod


# -- reversible equals plain -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("length", [32, 13])
def test_reversible_equals_plain_with_dropout_and_four_rounds(dtype, limit, length):
    """Sizes are near the published ones, embeddings of 1 and small matrices: rounding is undone relative to the streams."""
    model = reformer(dtype, depth=8, dropout=0.5, attention_dropout=0.1, embedding_dropout=0.1).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(3.0 if name.startswith("embedding") else 0.3)
    tokens, labels = tokens_for(model, seq=length)
    model.set_engine("store")
    plain, truth = gradients(model, tokens, labels)
    for engine in ("invert", "checkpoint"):
        model.set_engine(engine)
        loss, found = gradients(model, tokens, labels)
        assert loss == plain
        assert worst(found, truth) < limit


def test_two_forward_passes_and_a_new_draw_before_one_backward_pass():
    """Each call's backward pass runs with the buckets and the dropout of its own."""
    model = reformer(dropout=0.3).train()
    model.set_engine("store")
    truth = {}
    for step, seed in ((3, 1), (4, 2)):
        model.redraw(step)
        for name, value in gradients(model, *tokens_for(model, seed=seed), seed=seed)[1].items():
            truth[name] = truth.get(name, 0) + value
    model.set_engine("invert")
    model.zero_grad(set_to_none=True)
    losses = []
    for step, seed in ((3, 1), (4, 2)):
        model.redraw(step)
        tokens, labels = tokens_for(model, seed=seed)
        torch.manual_seed(seed)
        losses.append(model.loss(model.hidden(tokens), labels)[0])
    model.redraw(9)
    torch.manual_seed(77)
    (losses[0] + losses[1]).backward()
    assert worst({name: p.grad for name, p in model.named_parameters()}, truth) < 1e-12


def test_what_is_almost_a_tie_hashes_alike_in_both_runs():
    """Rounding in the second run would put such tokens elsewhere: here all directions are nearly one, in bf16."""
    model = reformer(torch.float32).to(torch.bfloat16).train()
    torch.manual_seed(0)
    with torch.no_grad():
        for attention in hashing(model):
            attention.rotations.mul_(0.02).add_(torch.randn(attention.rotations.shape[:3]).unsqueeze(-1))
    tokens, labels = tokens_for(model)
    seen = []
    for attention in hashing(model):
        order = attention.order_of

        def kept(*args, order=order):
            found = order(*args)
            seen.append(found[0].clone())
            return found

        attention.order_of = kept
    gradients(model, tokens, labels)
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(first) == 2 and all(torch.equal(a, b) for a, b in zip(first, reversed(second)))


# -- what users met elsewhere ------------------------------------------------------------------------------------------------
def test_frozen_embeddings_leave_the_layers_their_gradients():
    model = reformer().train()
    tokens, labels = tokens_for(model)
    _, truth = gradients(model, tokens, labels)
    model.embedding.requires_grad_(False)
    _, found = gradients(model, tokens, labels)
    assert len(found) == len(truth) - 3
    assert worst(found, {name: truth[name] for name in found}) < 1e-12


def test_autograd_grad_and_a_backward_pass_in_eval_mode():
    model = reformer(dropout=0.5).eval()
    tokens, labels = tokens_for(model)
    names, parameters = zip(*model.named_parameters())
    loss, _ = model.loss(model.hidden(tokens), labels)
    found = dict(zip(names, torch.autograd.grad(loss, parameters)))
    model.set_engine("store")
    assert worst(found, gradients(model, tokens, labels)[1]) < 1e-12


def test_random_numbers_of_the_caller_are_left_alone():
    model = reformer().train()
    tokens, labels = tokens_for(model)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model.redraw(2)
    model.loss(model.hidden(tokens), labels)[0].backward()
    assert torch.equal(torch.rand(3), expected)
    dropping = reformer(dropout=0.5).train()
    assert gradients(dropping, tokens, labels, seed=3)[0] == gradients(dropping, tokens, labels, seed=3)[0]


def test_any_length_after_any_other():
    """Nothing is kept of an earlier sequence: neither its buckets nor its length."""
    model, fresh = reformer().eval(), reformer().eval()
    long, _ = tokens_for(model)
    for length in (32, 16, 5, 21, 1, 32):
        with torch.no_grad():
            assert torch.equal(model(long[:, :length]), copy.deepcopy(fresh)(long[:, :length]))


def test_a_sequence_within_one_chunk_is_not_padded():
    model = reformer(lsh={"chunk": 4, "full_below": 8}, local={"chunk": 8})
    widths = []
    model.layers.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    for length in (3, 5, 8, 9, 17):
        model(tokens_for(model, seq=length)[0])
    assert widths == [3, 5, 8, 16, 24]


def test_more_rounds_for_an_evaluation():
    model, four = reformer(lsh={"chunk": 4}).eval(), reformer(lsh={"chunk": 4, "hashes": 4}).eval()
    tokens, _ = tokens_for(model)
    before = model(tokens)
    model.set_hashes(4)
    assert torch.equal(model(tokens), four(tokens)) and not torch.equal(model(tokens), before)
    model.set_hashes(1)
    assert torch.equal(model(tokens), before)
    with pytest.raises(ConfigError, match="at least one"):
        model.set_hashes(0)
    with pytest.raises(ConfigError, match="no layer"):
        reformer(attention="local", lsh={}).set_hashes(2)


# -- the module as a thing ---------------------------------------------------------------------------------------------------
def test_draws_are_a_function_of_seed_layer_and_step():
    model = reformer(attention="lsh", local={})
    drawn = [attention.rotations.clone() for attention in hashing(model)]
    assert len(drawn) == 4 and not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))
    model.redraw(5)
    assert not any(torch.equal(attention.rotations, old) for attention, old in zip(hashing(model), drawn))
    model.redraw(0)
    assert all(torch.equal(attention.rotations, old) for attention, old in zip(hashing(model), drawn))
    other = reformer(attention="lsh", local={}, seed=1)
    assert not any(torch.equal(attention.rotations, old) for attention, old in zip(hashing(other), drawn))
    assert not any("rotations" in name for name in model.state_dict())


def test_a_copy_and_a_model_from_meta_are_the_same_model():
    model = reformer(torch.float32).eval()
    model.redraw(3)
    tokens, _ = tokens_for(model)
    expected = model(tokens)
    assert torch.equal(copy.deepcopy(model)(tokens), expected)
    fresh = build_meta(config_of(**LAYERS)).to_empty(device="cpu").eval()
    fresh.load_state_dict(model.state_dict())
    fresh.redraw(3)
    assert torch.equal(fresh(tokens), expected)


def test_step_runs_as_in_training():
    model = reformer(torch.float32)
    loss, sums = TrainStep(model)(*tokens_for(model))
    assert loss.isfinite() and sums.shape == (3,)


# -- memory ------------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(TORCH < (2, 1), reason="storages have no lasting Python object before torch 2.1")
def test_memory_does_not_grow_with_depth():
    """But for the order of the tokens in each hashed layer: two bytes a token, head and round."""
    from benchmarks._common import LiveBytes, parameters_and_gradients

    peaks = {}
    for engine, depth in itertools.product(("invert", "store"), (4, 12)):
        model = reformer(torch.float32, depth=depth, dropout=0.1, lsh={"chunk": 4, "hashes": 2}).train()
        model.set_engine(engine)
        tokens, labels = tokens_for(model, batch=4)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model.loss(model.hidden(tokens), labels)[0].backward()
        gc.collect()
        with LiveBytes(parameters_and_gradients(model) + list(model.buffers()) + [tokens, labels]) as live:
            model.loss(model.hidden(tokens), labels)[0].backward()
            peaks[engine, depth] = live.peak
    orders = 4 * 2 * 2 * 32 * 2
    states = 5056 * 2
    growth = peaks["invert", 12] - peaks["invert", 4]
    assert growth <= 4 * orders + 8 * states, peaks
    assert growth < 0.15 * (peaks["store", 12] - peaks["store", 4]), peaks
