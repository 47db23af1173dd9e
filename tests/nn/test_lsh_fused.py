"""LSH and local attention on CPU, blocked and with backward passes written out: equal to the explicit functions and to finite
differences, in every type, with every mask, and with dropout that can be drawn again."""

from __future__ import annotations

import pytest
import torch

from ipu_lean.nn.attention import chunks, local_fused, lsh_fused, windows
from ipu_lean.nn.attention.chunks import Terms
from ipu_lean.nn.attention.local import LocalSelfAttention
from ipu_lean.nn.attention.lsh import LSHSelfAttention
from ipu_lean.nn.attention.sorting import bucket_order

pytestmark = pytest.mark.pod

CASES = {  # batch, seq, heads, rounds, chunk, before, after, causal, padded
    "published": (2, 64, 2, 1, 16, 1, 0, True, False),
    "three rounds": (1, 64, 2, 3, 16, 1, 0, True, False),
    "both sides": (2, 48, 3, 2, 16, 1, 1, False, False),
    "padded": (2, 64, 1, 2, 16, 2, 1, True, True),
    "padded, both sides": (2, 64, 2, 2, 16, 1, 1, False, True),
    "alone": (1, 64, 2, 4, 8, 0, 0, True, False),
    "its own neighbour": (1, 32, 2, 1, 16, 2, 2, True, False),
    "its own neighbour, padded": (2, 32, 1, 2, 16, 3, 0, True, True),
    "one chunk": (2, 16, 2, 2, 16, 1, 0, True, False),
}


@pytest.fixture(autouse=True, params=[2**20, 6000], ids=["one block", "blocks"])
def block_bytes(request, monkeypatch):
    """Small blocks, so that short sequences are cut in several."""
    monkeypatch.setattr(windows, "BLOCK_BYTES", request.param)


def make(case, dtype=torch.float64, size=8, spread=1.0):
    """Inputs, output gradient, (order, undo), terms of both functions."""
    batch, seq, heads, rounds, chunk, before, after, causal, padded = CASES[case]
    generator = torch.Generator().manual_seed(1)
    shape = (batch, seq, heads, size)
    tensors = [spread * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    q, k, v = (t.to(dtype).requires_grad_() for t in tensors[:3])
    present = None
    if padded:
        present = torch.ones(batch, seq, dtype=torch.bool)
        present[0, -19:] = False
        present[-1, :5] = False
    buckets = torch.randint(0, 6, (batch, heads, rounds, seq), generator=generator)
    terms = Terms(chunk, before, after, causal, present)
    return q, k, v, tensors[3].to(dtype), bucket_order(buckets, 6), terms


def lsh(module, made, **more):
    q, _, v, seed, (order, undo), terms = made
    out = module.lsh_attend(q, v, order, undo, terms._replace(score_mult=1.7, **more))
    return [out, *torch.autograd.grad(out, [q, v], seed)]


def local(module, made, **more):
    """Rows that may see nothing, those of absent tokens, mean nothing."""
    q, k, v, seed, _, terms = made
    out = module.local_attend(q, k, v, terms._replace(score_mult=0.4, **more))
    if terms.present is not None:
        out = out.masked_fill(terms.present.logical_not()[:, :, None, None], 0.0)
    return [out, *torch.autograd.grad(out, [q, k, v], seed)]


KINDS = {"lsh": (lsh, lsh_fused), "local": (local, local_fused)}


def assert_close(found, expected, bound):
    for mine, theirs in zip(found, expected):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert torch.isfinite(mine).all()
        mine, theirs = mine.double(), theirs.double()
        assert theirs.norm() > 0
        assert (mine - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_explicit_function(case, kind):
    run, module = KINDS[kind]
    made = make(case)
    assert_close(run(module, made), run(chunks, made), 1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["three rounds", "padded"])
def test_float32(case, kind):
    run, module = KINDS[kind]
    assert_close(run(module, make(case, torch.float32)), run(chunks, make(case, torch.float32)), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_round_inputs_and_results_only(kind, dtype):
    """So the distance to float64 on the rounded inputs is that of a single rounding."""
    run, module = KINDS[kind]
    made = make("three rounds", dtype, spread=2.0)
    exact = make("three rounds", dtype, spread=2.0)
    q, k, v = (t.detach().double().requires_grad_() for t in exact[:3])
    wide = run(chunks, (q, k, v, exact[3].double(), *exact[4:]))
    found = run(module, made)
    assert all(t.dtype == dtype for t in found)
    assert_close([t.double() for t in found], wide, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_finite_differences_with_dropout(kind):
    q, k, v, _, (order, undo), terms = make("three rounds", size=3)
    terms = terms._replace(dropout_p=0.4)

    def function(*tensors):
        torch.manual_seed(5)
        if kind == "lsh":
            return lsh_fused.lsh_attend(*tensors, order, undo, terms)
        return local_fused.local_attend(*tensors, terms)

    def head(t):
        return t[:, :, :1].detach().requires_grad_()

    order, undo = order[:, :1], undo[:, :1]
    tensors = [head(q), head(v)] if kind == "lsh" else [head(q), head(k), head(v)]
    assert torch.autograd.gradcheck(function, tensors, eps=1e-6, atol=1e-8, rtol=1e-6, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_keeps_the_mean_and_is_replayed_by_torchs_random_numbers(kind):
    run, module = KINDS[kind]
    made = make("published")
    plain = run(module, made)[0]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    draws = [run(module, made, dropout_p=0.5) for _ in range(60)]
    torch.set_rng_state(state)
    again = run(module, made, dropout_p=0.5)
    assert all(torch.equal(a, b) for a, b in zip(again, draws[0]))
    assert not torch.equal(draws[1][0], draws[0][0])
    mean = torch.stack([draw[0] for draw in draws]).mean(0)
    one = (draws[0][0] - plain).norm()
    assert one > 0.2 * plain.norm()
    assert (mean - plain).norm() < 0.2 * one  # 60 independent draws: 1 / sqrt(60) = 0.13 of one's error
    nothing = run(module, made, dropout_p=1.0)
    assert all(bool((t == 0).all()) for t in nothing)


@pytest.mark.parametrize("kind", KINDS)
def test_without_dropout_no_random_number_is_drawn(kind):
    options = {"chunk": 16, "attention_dropout": 0.5}
    attention = LSHSelfAttention(16, 2, seq=64, **options) if kind == "lsh" else LocalSelfAttention(16, 2, **options)
    x = torch.randn(1, 64, 16)
    before = torch.get_rng_state()
    attention.eval()(x)
    assert torch.equal(torch.get_rng_state(), before)
    attention.train()(x)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["three rounds", "padded", "its own neighbour"])
def test_no_weight_on_the_future_or_on_padding(case, kind):
    q, k, v, _, (order, undo), terms = make(case)
    present = terms.present
    out = lsh_fused.lsh_attend(q, v, order, undo, terms) if kind == "lsh" else local_fused.local_attend(q, k, v, terms)
    for token in (7, 20, q.shape[1] - 1):
        if present is not None and not present[0, token]:
            continue
        of, to = torch.autograd.grad(out[0, token].sum(), [v, q if kind == "lsh" else k], retain_graph=True)
        for gradient in (of, to):
            assert (gradient[0, token + 1 :] == 0).all()
            if present is not None:
                assert (gradient[0][~present[0]] == 0).all()
        assert of[0, : token + 1].abs().sum() > 0


def test_a_lonely_token_attends_to_itself_in_every_round():
    """The first token of a causal sequence: large negative scores must not cost digits, of outputs or of gradients."""
    q, _, v, _, (order, undo), terms = make("three rounds", torch.float32)
    out = lsh_fused.lsh_attend(q, v, order, undo, terms)
    assert torch.allclose(out[:, 0], v[:, 0], rtol=1e-6, atol=0)
    to_q, to_v = torch.autograd.grad(out[:, 0].sum(), [q, v])
    assert torch.allclose(to_v[:, 0], torch.ones_like(to_v[:, 0]), rtol=1e-6, atol=0)
    assert to_q.abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_may_be_views(kind):
    """Of one packed projection, with a gradient that is a view as well; and positions far apart are told apart in float32."""
    q, k, v, seed, orders, terms = make("both sides", torch.float32)
    run, module = KINDS[kind]
    packed = torch.stack([q, k, v], 2).detach().requires_grad_()
    strided = seed.transpose(1, 2).contiguous().transpose(1, 2)
    views = (*packed.unbind(2), strided, orders, terms)
    assert_close(run(module, views), run(chunks, (q, k, v, seed, orders, terms)), 1e-6)


def test_gradients_of_gradients_are_refused():
    q, k, v, _, _, terms = make("published")
    out = local_fused.local_attend(q, k, v, terms)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.sum(), q)


def test_where_it_applies():
    q, k, v, *_ = make("published")
    assert lsh_fused.applies(q, k) and local_fused.applies(q, k, v)
    assert not lsh_fused.applies(q, k.float())
    assert not lsh_fused.applies(q.to("meta"), k.to("meta"))
    assert not lsh_fused.applies(q[:0], k[:0])
    seen = []
    torch.func.vmap(lambda x: seen.append(lsh_fused.applies(x, x)) or x)(q.detach()[None])
    assert seen == [False]


def test_packed_inputs():
    q, k, v, seed, orders, terms = make("padded, both sides")
    terms = terms._replace(score_mult=1.7)
    for inputs, attend, attend_apart, told in (
        ((q, v), lsh_fused.lsh_attend_packed, lsh_fused.lsh_attend, (*orders, terms)),
        ((q, k, v), local_fused.local_attend_packed, local_fused.local_attend, (terms,)),
    ):
        packed = torch.stack(inputs, 2).detach().requires_grad_()
        out, apart = attend(packed, *told), attend_apart(*inputs, *told)
        assert torch.equal(out, apart)
        (grad,) = torch.autograd.grad(out, packed, seed)
        assert torch.equal(grad, torch.stack(torch.autograd.grad(apart, inputs, seed), 2))


@pytest.mark.parametrize("bias", [False, True])
def test_the_modules_use_it(monkeypatch, bias):
    """And the explicit functions where it does not apply or is not wanted; a watched projection is called."""
    calls = []
    for module in (lsh_fused, local_fused):
        for name in module.__all__[1:]:
            original = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, _f=original, **k: calls.append(_f.__name__) or _f(*a, **k))
    x = torch.randn(1, 64, 16)
    for module in (LSHSelfAttention(16, 2, chunk=16, seq=64, bias=bias), LocalSelfAttention(16, 2, chunk=16, bias=bias)):
        calls.clear()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_()
        fused = module(x)
        mapped = torch.func.vmap(module)(x[None])[0]
        assert len(calls) == 1 and calls[0].endswith("_packed")
        handle = module.value.register_forward_hook(lambda *_: calls.append("watched"))
        apart = module(x)
        handle.remove()
        assert calls[1] == "watched" and len(calls) == 3 and not calls[2].endswith("_packed")
        module.set_implementation("explicit")
        explicit = module(x)
        assert len(calls) == 3
        for other in (fused, mapped, apart):
            assert (other - explicit).norm() < 1e-6 * explicit.norm() > 0


def test_autocast_leaves_the_inside_alone():
    made = make("published", torch.float32)
    expected = lsh(lsh_fused, made)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = lsh(lsh_fused, made)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
