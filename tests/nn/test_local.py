"""Local attention: against Hugging Face's and against the definition in loops, causality, masks, lengths, types."""

from __future__ import annotations

import copy

import pytest
import torch

from ipu_lean.errors import ConfigError
from ipu_lean.nn import CausalSelfAttention, LocalSelfAttention, Rotary
from tests.nn import reformer_reference as reference
from tests.nn.lsh_common import assert_transformed_alike, close, gradients, some_present

pytestmark = pytest.mark.pod


def make(width=16, heads=2, head_size=None, *, chunk=8, implementation="explicit", **options):
    torch.manual_seed(1)
    module = LocalSelfAttention(width, heads, head_size, chunk=chunk, implementation=implementation, **options).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=1.5 * width**-0.5)
    return module


# seq, causal, padded, before, after
CASES = [
    (64, True, False, 1, 0),
    (64, True, True, 1, 0),
    (64, False, True, 1, 1),
    (64, False, False, 2, 1),
    (64, True, True, 2, 1),
    (64, True, False, 0, 0),
    (64, False, True, 0, 1),
    (16, False, True, 1, 1),  # the neighbours before and after are the same chunk
    (8, True, True, 1, 0),
    (5, False, True, 1, 1),
]


@pytest.mark.parametrize("seq,causal,padded,before,after", CASES)
@pytest.mark.parametrize("implementation", ["explicit", "fused"])
def test_equals_hugging_face(seq, causal, padded, before, after, implementation):
    shape = {"chunk": 8, "before": before, "after": after, "causal": causal}
    theirs = reference.hugging_face("local", width=24, heads=3, head_size=6, seq=64, **shape)
    ours = make(24, 3, 6, implementation=implementation, **shape)
    names = ("query", "key", "value")
    with torch.no_grad():
        for name in names:
            getattr(ours, name).linear.weight.copy_(getattr(theirs, name).weight)
    x = torch.randn(2, seq, 24, dtype=torch.float64, requires_grad=True)
    present = some_present(2, seq) if padded else None
    out = ours.out.linear.weight
    expected = theirs(x, attention_mask=present).hidden_states @ out.t()
    got = ours(x, present=present)
    assert close(got, expected, 1e-12)
    found = gradients(got, [x, out, *(getattr(ours, name).linear.weight for name in names)])
    wanted = gradients(expected, [x, out, *(getattr(theirs, name).weight for name in names)])
    for gradient, other in zip(found, wanted):
        assert other.abs().max() > 1e-3 and close(gradient, other, 1e-10)


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
@pytest.mark.parametrize("seq,causal,padded,before,after", CASES[1:4] + CASES[6:])
def test_equals_the_definition(implementation, seq, causal, padded, before, after):
    module = make(before=before, after=after, causal=causal, implementation=implementation, scale=0.3, bias=True)
    x = torch.randn(2, seq, 16, dtype=torch.float64, requires_grad=True)
    present = some_present(2, seq) if padded else None
    q, k, v = (layer(x).view(2, seq, 2, 8) for layer in (module.query, module.key, module.value))
    shape = {"chunk": 8, "before": before, "after": after, "causal": causal, "scale": 0.3}
    rows = []
    for b in range(2):
        own = present[b] if padded else None
        heads = [reference.local_by_loops(q[b, :, h], k[b, :, h], v[b, :, h], present=own, **shape) for h in range(2)]
        rows.append(torch.stack(heads, 1))
    expected, got = module.out(torch.stack(rows).flatten(2)), module(x, present=present)
    stands = present if padded else torch.ones(2, seq, dtype=torch.bool)
    assert close(got[stands], expected[stands], 1e-12) and got.isfinite().all()
    parameters = [x, *module.parameters()]
    for gradient, other in zip(gradients(got[stands], parameters), gradients(expected[stands], parameters)):
        assert close(gradient, other, 1e-11)


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
def test_it_is_full_attention_with_a_band(implementation):
    module = make(before=1, implementation=implementation, positions=Rotary(32, 8).double(), bias=True)
    full = CausalSelfAttention(16, 2, implementation="explicit", positions=Rotary(32, 8)).double()
    full.load_state_dict(module.state_dict())
    x = torch.randn(2, 32, 16, dtype=torch.float64)
    at = torch.arange(32) // 8
    band = (at[:, None] - at <= 1)[None, None]
    assert close(module(x), full(x, mask=band), 1e-12)
    assert close(module(x[:, :8]), full(x[:, :8]), 1e-12)


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
def test_the_future_is_not_seen(implementation):
    module = make(before=2, after=1, implementation=implementation)
    x = torch.randn(1, 64, 16, dtype=torch.float64)
    for changed_at in (0, 20, 63):
        changed = x.clone()
        changed[:, changed_at] += 1
        difference = (module(changed) - module(x)).abs().amax((0, 2))
        assert difference[:changed_at].eq(0).all() and difference[changed_at] > 0


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
def test_neighbours_are_circular_without_causality(implementation):
    module = make(causal=False, before=1, implementation=implementation)
    x = torch.randn(1, 64, 16, dtype=torch.float64)
    changed = x.clone()
    changed[:, -1] += 1
    difference = (module(changed) - module(x)).abs().amax((0, 2))
    assert difference[:8].min() > 0 and difference[8:56].max() == 0 and difference[56:].min() > 0


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq", [64, 8])
def test_absent_tokens_never_influence_others(implementation, causal, seq):
    module = make(causal=causal, implementation=implementation)
    x, present = torch.randn(3, seq, 16, dtype=torch.float64), some_present(3, seq)
    present[2] = True
    other = torch.where(present[..., None], x, 100 * torch.randn_like(x))
    got, again = module(x, present=present), module(other, present=present)
    assert torch.equal(got[present], again[present]) and again.isfinite().all()
    assert torch.equal(module(x, present=torch.ones_like(present)), module(x))
    assert module(x, present=torch.zeros_like(present)).isfinite().all()


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
def test_the_amount_of_padding_does_not_matter(implementation):
    module = make(implementation=implementation)
    x = torch.randn(1, 64, 16, dtype=torch.float64)
    present = torch.arange(64)[None] < 21
    short = module(x[:, :24], present=present[:, :24])
    assert close(module(x, present=present)[:, :21], short[:, :21], 1e-13)


def test_lengths_and_what_is_refused():
    module, x = make(), torch.randn(2, 64, 16, dtype=torch.float64)
    fresh = make()(x[:, :32])
    module(x)
    assert torch.equal(module(x[:, :32]), fresh)
    assert module(x[:, :5]).shape == (2, 5, 16)
    with pytest.raises(ConfigError, match="multiple of the chunk"):
        module(x[:, :12])
    with pytest.raises(ConfigError, match="mask for pairs"):
        module(x, mask=torch.ones(64, 64, dtype=torch.bool))
    with pytest.raises(ConfigError, match="another sequence"):
        module(x, x)
    for options in ({"chunk": 0}, {"before": -1}, {"implementation": "fast"}):
        with pytest.raises(ConfigError):
            make(**options)


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.06), (torch.float16, 0.01)])
@pytest.mark.parametrize("seq", [64, 8])
def test_every_type(implementation, dtype, tolerance, seq):
    if not reference.multiplies(dtype):
        pytest.skip(f"this torch has no matrix products of {dtype} on CPU")
    exact = make(positions=Rotary(64, 8))
    module = copy.deepcopy(exact).to(dtype)
    module.set_implementation(implementation)
    x = torch.randn(2, seq, 16).to(dtype).requires_grad_()
    present = some_present(2, seq)
    got, expected = module(x, present=present), exact(x.detach().double(), present=present)
    assert got.dtype == dtype and (got.double() - expected).norm() <= tolerance * expected.norm()
    got.float().square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in (x, *module.parameters()))
    large = module((20 * x.detach()).requires_grad_(), present=present)
    assert large.isfinite().all()


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(implementation, dtype):
    if not reference.multiplies(dtype):
        pytest.skip(f"this torch has no matrix products of {dtype} on CPU")
    module = make(implementation=implementation).float()
    x = torch.randn(2, 64, 16, requires_grad=True)
    with torch.autocast("cpu", dtype):
        y = module(x, present=some_present(2, 64))
    assert y.dtype == dtype
    y.float().square().sum().backward()
    assert x.grad.isfinite().all() and x.grad.abs().max() > 0


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
def test_dropout(implementation):
    module = make(attention_dropout=0.5, dropout=0.5, implementation=implementation)
    x = torch.randn(2, 64, 16, dtype=torch.float64)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(module(x))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert torch.equal(module.eval()(x), make(implementation=implementation)(x))


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
@pytest.mark.parametrize("seq", [64, 8])
def test_torch_func_and_copies(seq, implementation):
    module = make(implementation=implementation)
    x = torch.randn(3, seq, 16, dtype=torch.float64)
    assert_transformed_alike(module, x)
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    with torch.device("meta"):
        assert LocalSelfAttention(16, 2, chunk=8)(torch.zeros(2, seq, 16)).is_meta
