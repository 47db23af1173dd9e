"""Memory levers of a GPT: the numbers stay, the memory goes."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks._common import LiveBytes, parameters_and_gradients
from ipu_lean._compat import TORCH
from tests.models.common import tiny, tokens_for

pytestmark = pytest.mark.pod
counts_bytes = pytest.mark.skipif(TORCH < (2, 1), reason="storages have no lasting Python object before torch 2.1")
LEVERS = {"ffn_chunk": 7, "attention_heads_at_once": 3}
MODELS = [
    {},
    {"dropout": 0.3, "embedding_dropout": 0.1},
    {"sandwich": True, "dropout": 0.2, "bias": False},
    {"activation": "swiglu", "norm": "rmsnorm", "stack": {"order": "aaff"}, "dropout": 0.2},
    {"num_hidden_groups": 1, "depth": 4, "positions": "learned"},
    {"stack": {"coupling": "affine"}, "dropout": 0.1},
    {"stack": {"coupling": "momentum", "beta": 0.9}, "attention": "explicit"},
    {"stack": {"kind": "residual"}, "dropout": 0.1},
]


def step(model, mask=None, autocast=False):
    """(hidden states, gradients by name, the generator's state afterwards) of one step in training."""
    tokens, labels = tokens_for(model, batch=3)
    torch.manual_seed(3)
    with torch.autocast("cpu", enabled=autocast):
        h = model.hidden(tokens, mask=mask)
        loss, _ = model.loss(h, labels)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and not n.endswith("key.linear.bias")}
    return h.detach(), grads, torch.get_rng_state()


def memory(engine="auto", **levers):
    return {"engine": engine, **levers}


def assert_equal(reference, found, tolerance):
    assert (reference[0] - found[0]).norm() <= tolerance * reference[0].norm()
    assert set(reference[1]) == set(found[1])
    for name, gradient in reference[1].items():
        assert gradient.norm() > 0, name
        assert (gradient - found[1][name]).norm() <= tolerance * gradient.norm(), name
    assert torch.equal(reference[2], found[2]), "as many random numbers"


@pytest.mark.parametrize("engine", ["auto", "checkpoint", "store"])
@pytest.mark.parametrize("model", MODELS)
def test_same_numbers_same_dropout(model, engine):
    make = {"heads": 4, **model}
    reference = step(tiny(memory=memory("store"), **make).double())
    assert_equal(reference, step(tiny(memory=memory(engine, **LEVERS), **make).double()), 1e-10)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(12, 12), (4, 12, 12), (1, 1, 12, 12), (3, 4, 12, 12)])
def test_masks(heads, shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.3
    reference = step(tiny(heads=4, memory=memory("store")).double(), mask)
    assert_equal(reference, step(tiny(heads=4, memory=memory(attention_heads_at_once=heads)).double(), mask), 1e-10)


def test_blockwise_attention_in_parts():
    """Long enough for the kernel of our own, which the short ones above do not reach."""
    make = {"heads": 4, "seq": 256, "width": 32}
    reference = step(tiny(memory=memory("store"), **make))
    assert_equal(reference, step(tiny(memory=memory(ffn_chunk=100, attention_heads_at_once=2), **make)), 3e-5)


def test_autocast():
    make = {"heads": 4, "dropout": 0.2}
    reference = step(tiny(memory=memory("store"), **make), autocast=True)
    assert_equal(reference, step(tiny(memory=memory(**LEVERS), **make), autocast=True), 0.06)
    kept = step(tiny(memory=memory("store", **LEVERS), **make), autocast=True)
    again = step(tiny(memory=memory("checkpoint", **LEVERS), **make), autocast=True)
    assert_equal(kept, again, 0.0)


def test_attention_dropout_is_replayed_within_its_parts():
    make = {"heads": 4, "attention_dropout": 0.4, "attention": "explicit"}
    levers = {"attention_heads_at_once": 1}
    kept = step(tiny(memory=memory("store", **levers), **make).double())
    assert_equal(kept, step(tiny(memory=memory(**levers), **make).double()), 1e-10)


def test_eval_and_cache():
    model, plain = tiny(heads=4, memory=memory(**LEVERS)).eval(), tiny(heads=4).eval()
    tokens, _ = tokens_for(model, batch=3)
    with torch.no_grad():
        expected = plain.logits(tokens)
        assert torch.allclose(model.logits(tokens), expected, atol=1e-5)
        cache = model.new_cache(3)
        parts = [model.logits(part, cache) for part in (tokens[:, :8], tokens[:, 8:])]
        assert torch.allclose(torch.cat(parts, 1), expected, atol=1e-5)


def test_watched_layers_run_whole():
    """A hook on a projection sees all of its output, as without levers."""
    model, seen = tiny(heads=4, memory=memory(**LEVERS)), []
    block = model.layers.executed()[0]
    block.branches[0].attention.query.register_forward_hook(lambda module, given, out: seen.append(out.shape))
    block.branches[1].feed_forward.up.register_forward_hook(lambda module, given, out: seen.append(out.shape))
    model.hidden(tokens_for(model, batch=3)[0])
    assert seen == [(3, 12, 16), (3, 12, 64)]


def test_keep_last_and_segments():
    parts = [
        {"layers": 2, "engine": "checkpoint", "checkpoint_every": 2},
        {"layers": 1, "engine": "invert"},
        {"layers": 1, "engine": "store"},
    ]
    reference = step(tiny(depth=4, memory=memory("store")).double())
    for choice in ({"keep_last": 2}, {"keep_last": 4}, {"segments": parts}, {"keep_last": 1, **LEVERS}):
        assert_equal(reference, step(tiny(depth=4, memory=memory(**choice)).double()), 1e-10)
    residual = {"depth": 4, "stack": {"kind": "residual"}}
    reference = step(tiny(memory=memory("store"), **residual).double())
    found = tiny(memory=memory("checkpoint", checkpoint_every=2, keep_last=1), **residual).double()
    assert [tuple(part) for part in found.layers.segments] == [(3, "checkpoint", 2), (1, "store", 1)]
    assert_equal(reference, step(found), 1e-10)


@counts_bytes
@pytest.mark.parametrize(("attention", "engine"), [("explicit", "auto"), ("explicit", "store"), ("fused", "auto")])
def test_less_memory(attention, engine):
    make = {"heads": 4, "seq": 256, "width": 32, "attention": attention, "depth": 3}

    def peak(**levers):
        model = tiny(memory=memory(engine, **levers), **make)
        tokens, _ = tokens_for(model, batch=4)
        with LiveBytes(parameters_and_gradients(model) + list(model.buffers())) as live:
            model.hidden(tokens).pow(2).mean().backward()
            assert live.now == 0
        return live.peak

    assert peak(ffn_chunk=64, attention_heads_at_once=4) < 0.6 * peak()


def test_groups_of_heads_with_padding_both_ways_and_heads_of_any_size():
    plain = tiny(heads=4, head_size=6, dropout=0.2).double().train()
    parts = copy.deepcopy(plain)
    for model in (plain, parts):
        for block in model.layers.blocks:
            block.branches[0].attention.causal = False
    for block in parts.layers.blocks:
        block.branches[0].heads_at_once = 3
    tokens, labels = tokens_for(plain, seq=9)
    present = torch.arange(9).expand(2, 9) < torch.tensor([[9], [4]])
    found = []
    for model in (plain, parts):
        torch.manual_seed(3)
        loss, _ = model.loss(model.hidden(tokens, present=present), labels.masked_fill(~present, -100))
        loss.backward()
        found.append((loss.item(), {name: p.grad for name, p in model.named_parameters()}))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-13)
    for name, truth in found[0][1].items():
        assert truth.norm() > 0 and (found[1][1][name] - truth).norm() < 1e-12 * truth.norm(), name
