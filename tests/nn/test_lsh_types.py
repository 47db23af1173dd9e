"""LSH attention in every type: 16 bits, autocast, large numbers, memory that holds NaN."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.nn import reformer_reference as reference
from tests.nn.lsh_common import make, some_present

pytestmark = pytest.mark.pod


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.08), (torch.float16, 0.01)])
@pytest.mark.parametrize("seq", [64, 8])
def test_every_type(implementation, dtype, tolerance, seq):
    if not reference.multiplies(dtype):
        pytest.skip(f"this torch has no matrix products of {dtype} on CPU")
    exact = make(hashes=2)
    x, present = torch.randn(2, seq, 16, dtype=torch.float64).to(dtype).double(), some_present(2, seq)
    module = copy.deepcopy(exact).to(dtype)
    module.set_implementation(implementation)
    kept = []
    for which in (module, exact):  # both with the order of the first: hashes of rounded queries differ

        def remember(compute):
            if not kept:
                kept.append(compute())
            return kept[0]

        which.remember = remember
    given = x.to(dtype).requires_grad_()
    got = module(given, present=present)
    assert got.dtype == dtype
    expected = exact(x, present=present)
    assert (got.double() - expected).norm() <= tolerance * expected.norm()
    got.float().square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in (given, *module.parameters()))


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
def test_large_numbers_in_16_bits(implementation):
    """Scores of thousands and constants of -1e9 must not become infinite or NaN."""
    for dtype in filter(reference.multiplies, (torch.float16, torch.bfloat16)):
        module = make(hashes=2, implementation=implementation).to(dtype)
        x = (300 * torch.randn(2, 64, 16)).to(dtype).requires_grad_()
        y = module(x, present=some_present(2, 64))
        (1e-4 * y.float()).sum().backward()
        assert y.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
@pytest.mark.parametrize("seq", [64, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(implementation, seq, dtype):
    if not reference.multiplies(dtype):
        pytest.skip(f"this torch has no matrix products of {dtype} on CPU")
    module = make(hashes=2, implementation=implementation).float()
    x = torch.randn(2, seq, 16, requires_grad=True)
    with torch.autocast("cpu", dtype):
        y = module(x, present=some_present(2, seq))
    assert y.dtype == dtype
    y.float().square().sum().backward()
    assert x.grad.dtype == torch.float32 and x.grad.isfinite().all() and x.grad.abs().max() > 0


@pytest.mark.parametrize("hashes", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_fresh_memory_is_written_before_it_is_read(monkeypatch, hashes, dropout):
    """Products that add to nothing must not keep the NaN that memory may hold; torch 2.0.1's small ones do."""
    module = make(chunk=4, hashes=hashes, attention_dropout=dropout, implementation="fused").float()
    x = torch.randn(2, 32, 16, requires_grad=True)
    empty = torch.empty

    def full_of_nan(*shape, **options):
        found = empty(*shape, **options)
        return found.fill_(float("nan")) if found.dtype.is_floating_point else found

    monkeypatch.setattr(torch, "empty", full_of_nan)
    y = module(x, present=some_present(2, 32))
    y.square().sum().backward()
    assert y.isfinite().all() and all(p.grad.isfinite().all() for p in (x, *module.parameters()))
