"""LSH attention: against Hugging Face's and against the definition in loops, masks, lengths, padding, what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from ipu_lean.errors import ConfigError
from ipu_lean.nn import Rotary
from ipu_lean.nn.attention.hashing import bucket_factors, hash_buckets
from tests.nn import reformer_reference as reference
from tests.nn.lsh_common import close, gradients, make, some_present

pytestmark = pytest.mark.pod


# seq, chunk, hashes, buckets, causal, padded, before, after
CASES = [
    (128, 16, 1, 8, True, False, 1, 0),
    (128, 16, 2, 8, True, True, 1, 0),
    (128, 16, 3, [4, 4], False, False, 2, 1),
    (128, 16, 4, [4, 8], True, True, 1, 0),
    (128, 16, 1, 8, False, True, 1, 1),
    (128, 16, 2, 8, True, True, 0, 0),
    (128, 16, 4, [2, 6], False, True, 0, 1),
    (128, 16, 3, 6, True, False, 2, 0),
    (128, 16, 1, [4, 4], True, True, 2, 1),
    (128, 16, 2, None, True, True, 1, 0),
    (256, 4, 2, None, True, False, 1, 0),  # 128 buckets in two factors
    (16, 16, 2, 8, True, True, 1, 0),  # one chunk: all pairs
    (5, 16, 2, 8, False, False, 1, 0),
]


@pytest.mark.parametrize("seq,chunk,hashes,buckets,causal,padded,before,after", CASES)
@pytest.mark.parametrize("implementation,sorting", [("explicit", "sort"), ("explicit", "counting"), ("fused", "sort")])
def test_equals_hugging_face(seq, chunk, hashes, buckets, causal, padded, before, after, implementation, sorting):
    shape = {"chunk": chunk, "before": before, "after": after, "causal": causal, "hashes": hashes, "buckets": buckets}
    theirs = reference.hugging_face("lsh", width=24, heads=3, head_size=6, seq=256, **shape)
    ours = make(24, 3, 6, seq=256, implementation=implementation, sorting=sorting, **shape)
    columns = sum(bucket_factors(seq, chunk, buckets, 256)) // 2
    with torch.no_grad():
        ours.query_key.linear.weight.copy_(theirs.query_key.weight)
        ours.value.linear.weight.copy_(theirs.value.weight)
        ours.rotations[..., :columns] = reference.their_rotations(3, 6, hashes, columns)
    x = torch.randn(2, seq, 24, dtype=torch.float64, requires_grad=True)
    present = some_present(2, seq) if padded else None
    expected = theirs(x, attention_mask=present).hidden_states @ ours.out.linear.weight.t()
    got = ours(x, present=present)
    if implementation == "explicit":
        assert close(got, expected, 1e-12)
    else:  # theirs is rounded at 1e-11 where a token is alone with itself in several rounds, and fused kernels are not
        error = (got - expected).detach().abs().amax(-1)
        assert error.max() < 1e-10 and (error < 1e-12 * max(1.0, float(expected.detach().abs().max()))).float().mean() > 0.9
    found = gradients(got, [x, ours.query_key.linear.weight, ours.value.linear.weight, ours.out.linear.weight])
    wanted = gradients(expected, [x, theirs.query_key.weight, theirs.value.weight, ours.out.linear.weight])
    for gradient, other in zip(found, wanted):
        assert other.abs().max() > 1e-3 and close(gradient, other, 1e-10)


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
@pytest.mark.parametrize(
    "hashes,buckets,causal,padded,before,after",
    [(1, 4, True, False, 1, 0), (2, [2, 4], False, True, 1, 1), (3, None, True, True, 0, 0), (2, 6, True, False, 2, 1)],
)
def test_equals_the_definition(implementation, hashes, buckets, causal, padded, before, after):
    seq, heads = 32, 2
    module = make(
        8, heads, 3, seq=seq, chunk=4, before=before, after=after, hashes=hashes, buckets=buckets, causal=causal,
        implementation=implementation, score_mult=1.7, bias=True,
    )  # fmt: skip
    x = torch.randn(2, seq, 8, dtype=torch.float64, requires_grad=True)
    present = some_present(2, seq) if padded else None
    qk, v = (layer(x).view(2, seq, heads, 3) for layer in (module.query_key, module.value))
    buckets = hash_buckets(qk, module.rotations, bucket_factors(seq, 4, buckets, seq), present)[0]
    shape = {"chunk": 4, "before": before, "after": after, "causal": causal, "score_mult": 1.7}
    rows = [
        [
            reference.lsh_by_loops(qk[b, :, h], v[b, :, h], buckets[b, h], present=present[b] if padded else None, **shape)
            for h in range(heads)
        ]
        for b in range(2)
    ]
    mixed = torch.stack([torch.stack(row, 1) for row in rows])
    expected, got = module.out(mixed.flatten(2)), module(x, present=present)
    assert close(got, expected, 1e-10)  # a token alone with itself: the sum of exponentials near -1e5 rounds at 1e-11
    parameters = [x, *module.parameters()]
    for gradient, other in zip(gradients(got, parameters), gradients(expected, parameters)):
        assert close(gradient, other, 1e-10)


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
@pytest.mark.parametrize("padded", [False, True])
def test_short_sequences_attend_to_everything_but_themselves(implementation, padded):
    module = make(full_below=24, implementation=implementation)
    for seq in (1, 5, 24):
        x = torch.randn(2, seq, 16, dtype=torch.float64)
        present = some_present(2, seq) if padded and seq > 5 else None
        qk, v = (layer(x).view(2, seq, 2, 8).transpose(1, 2) for layer in (module.query_key, module.value))
        keys = qk / (qk.square().mean(-1, keepdim=True) + 1e-6).sqrt() / 8**0.5
        scores = qk @ keys.transpose(-1, -2)
        scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -1e9)
        if present is not None:
            scores = scores.masked_fill(~present[:, None, None], -1e9)
        scores = scores.masked_fill(torch.eye(seq).bool(), -1e5)
        expected = module.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        assert close(module(x, present=present), expected, 1e-12)


def test_a_longer_full_below_never_hashes():
    """Then nothing depends on the rotations, and nothing on later tokens."""
    module = make(full_below=64)
    x = torch.randn(1, 64, 16, dtype=torch.float64)
    first = module(x)
    module.redraw(3)
    assert torch.equal(module(x), first)
    changed = x.clone()
    changed[:, 40:] += 1
    assert torch.equal(module(changed)[:, :40], first[:, :40])
    module.full_below = 8
    assert not torch.allclose(module(x), first)


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
@pytest.mark.parametrize("hashes", [1, 4])
def test_no_weight_is_put_on_the_future(implementation, hashes):
    """Values of later tokens never matter; that the *choice* of past tokens may depend on later ones is the published design."""
    module = make(hashes=hashes, implementation=implementation)
    qk, v = (torch.randn(2, 64, 2, 8, dtype=torch.float64) for _ in range(2))
    later = v.clone()
    later[:, 40:] *= 1e6
    difference = (module.attended(qk, later, None) - module.attended(qk, v, None)).abs().amax((0, 2, 3))
    assert difference[:40].max() == 0 and difference[40:].max() > 1e3


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq", [64, 8])
def test_absent_tokens_never_influence_others(implementation, causal, seq):
    module = make(hashes=2, causal=causal, implementation=implementation)
    x, present = torch.randn(3, seq, 16, dtype=torch.float64), some_present(3, seq)
    present[2] = True
    other = torch.where(present[..., None], x, 100 * torch.randn_like(x))
    got, again = module(x, present=present), module(other, present=present)
    assert torch.equal(got[present], again[present])
    assert torch.isfinite(again).all()
    assert module(x, present=torch.zeros_like(present)).isfinite().all()


def test_all_present_is_the_same_as_not_saying_so():
    module = make(hashes=2)
    x = torch.randn(2, 64, 16, dtype=torch.float64)
    present = torch.ones(2, 64, dtype=torch.bool)
    assert torch.equal(module(x, present=present), module(x))
    assert torch.equal(module(x, present=present.long()), module(x))


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
def test_each_sequence_is_on_its_own(implementation):
    module = make(hashes=2, implementation=implementation)
    x, present = torch.randn(3, 64, 16, dtype=torch.float64), some_present(3, 64)
    together = module(x, present=present)
    for row in range(3):
        alone = module(x[row : row + 1], present=present[row : row + 1])
        assert close(together[row : row + 1], alone, 1e-12)


def test_any_length_after_any_other():
    module = make()
    x = torch.randn(1, 64, 16, dtype=torch.float64)
    fresh = make()(x[:, :32])
    module(x)
    assert torch.equal(module(x[:, :32]), fresh)
    for wrong in (9, 60):
        with pytest.raises(ConfigError, match="multiple of the chunk") as caught:
            module(x[:, :wrong])
        assert f"{-(-wrong // 8) * 8} tokens" in str(caught.value)
    with pytest.raises(ConfigError, match="longer than the context"):
        module(torch.cat([x, x], 1))


def test_what_is_not_there_is_refused():
    module, x = make(), torch.randn(2, 16, 16, dtype=torch.float64)
    with pytest.raises(ConfigError, match="present"):
        module(x, mask=torch.ones(16, 16, dtype=torch.bool))
    with pytest.raises(ConfigError, match="another sequence"):
        module(x, torch.randn(2, 16, 16, dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"\[batch, seq\]"):
        module(x, present=torch.ones(2, 15, dtype=torch.bool))
    for options in ({"hashes": 0}, {"chunk": 0}, {"before": -1}, {"after": -1}, {"buckets": 5}, {"implementation": "fast"}):
        with pytest.raises(ConfigError):
            make(**options)
    with pytest.raises(ConfigError, match="head_size"):
        make(16, 3)
    with pytest.raises(ConfigError, match="at least one round"):
        module.set_hashes(0)


FEATURES = {
    "rotary": {"positions": Rotary(64, 8)},
    "rounds": {"hashes": 3},
    "factors": {"buckets": [2, 4]},
    "sides": {"before": 2, "after": 1},
    "both ways": {"causal": False},
    "dropout": {"attention_dropout": 0.3, "dropout": 0.2},
    "biases": {"bias": True, "mult": 0.5, "score_mult": 0.7},
    "short": {"full_below": 32},
    "counting": {"sorting": "counting"},
}


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
def test_any_two_features_combine(implementation):
    x = torch.randn(2, 64, 16)
    for one, other in itertools.combinations(FEATURES, 2):
        module = make(implementation=implementation, **FEATURES[one], **FEATURES[other]).float()
        for seq in (64, 32, 8, 5):
            given = x[:, :seq].clone().requires_grad_()
            y = module(given, present=some_present(2, seq))
            y.square().sum().backward()
            assert y.shape == given.shape and y.isfinite().all() and given.grad.isfinite().all(), (one, other, seq)
            assert given.grad.abs().max() > 0


def test_heads_need_not_fill_the_width():
    module = make(16, 3, 4)
    assert module.out.linear.weight.shape == (16, 12) and module.query_key.linear.weight.shape == (12, 16)
    assert module(torch.randn(2, 64, 16, dtype=torch.float64)).shape == (2, 64, 16)


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
def test_more_rounds_come_nearer_to_all_pairs(implementation):
    """The purpose of hashing: what is left out matters little, and less with every round."""
    module = make(32, 4, chunk=16, seq=128, causal=False, implementation=implementation)
    x = torch.randn(4, 128, 32, dtype=torch.float64)
    qk, v = (layer(x).view(4, 128, 4, 8) for layer in (module.query_key, module.value))
    qk = 4 * qk  # peaked, as attention is after training
    module.full_below = 128
    exact = module.attended(qk, v, None)
    module.full_below = 16
    errors = []
    for hashes in (1, 4, 16):
        module.set_hashes(hashes)
        errors.append(float((module.attended(qk, v, None) - exact).detach().norm() / exact.detach().norm()))
    assert errors[0] > 1.2 * errors[1] > 1.4 * errors[2] and errors[2] < 0.5


def test_rotary_positions_turn_queries_before_they_are_hashed():
    module = make(positions=Rotary(64, 8).double(), causal=False)
    x = torch.randn(1, 64, 16, dtype=torch.float64)
    qk, v = (layer(x).view(1, 64, 2, 8) for layer in (module.query_key, module.value))
    expected = module.out(module.attended(module.positions(qk), v, None).flatten(2))
    assert torch.equal(module(x), expected)
    assert not torch.allclose(expected, module.out(module.attended(qk, v, None).flatten(2)))
