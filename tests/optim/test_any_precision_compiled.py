"""Compiled updates, in C and by torch.compile, against the eager ones; and what happens without a compiler."""
from __future__ import annotations

import os
import stat
import warnings

import pytest
import torch

from ipu_lean import _compat
from ipu_lean.errors import ConfigError
from ipu_lean.optim import AnyPrecisionAdamW, native
from ipu_lean.optim import any_precision_rules as rules
from tests.optim.test_any_precision import parameters, run

pytestmark = pytest.mark.pod
BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = ((200, 300), (40001,), (7,), (64,), (64,), (33, 5), ())
needs_cc = pytest.mark.skipif(native.compiler() is None, reason="there is no C compiler")
no_torch_compile = _compat.why_not_compiled("cpu")
needs_torch_compile = pytest.mark.skipif(no_torch_compile is not None, reason=str(no_torch_compile))


def both(steps=6, **options):
    """Parameters and state after some steps at falling rates: compiled, eager."""
    found = []
    for compiled in (True, False):
        params = parameters(BF16, SHAPES)
        settings = {"betas": (0.9, 0.95), "momentum_dtype": BF16, "weight_decay": 0.1, "seed": 5, **options}
        optimizer = AnyPrecisionAdamW(params, compiled=compiled, **settings)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
            run(optimizer, params, 1, start=step)
        found.append((params, [optimizer.state[p] for p in params]))
    return found


def assert_alike(one, other, share):
    """At least `share` of all numbers, in weights and in each kind of state, have the same bits; no weight is further off than
    its last place. `lowest`, the last bits of an fp32, is left out.
    """
    equal = {}
    start = parameters(BF16, SHAPES)
    for a, b, left, right, begin in zip(one[0], other[0], one[1], other[1], start):
        assert not torch.isnan(a).any() and (a.float() - b.float()).abs().max() <= 2**-7
        assert a.numel() < 10 or not torch.equal(a, begin)
        for key, x, y in [("weight", a, b), *((key, left[key], right[key]) for key in left)]:
            assert x.dtype == y.dtype
            if key != "lowest":
                equal.setdefault(key, []).append((x == y).flatten())
    for key, parts in equal.items():
        assert float(torch.cat(parts).float().mean()) >= share, key


@needs_cc
@pytest.mark.parametrize("variance", ["auto", "stochastic"])
@pytest.mark.parametrize("summation", ["kahan", "split", "stochastic", "none"])
def test_c_rounds_as_eager_code_does(summation, variance, monkeypatch):
    """Bit by bit, except where the last bit of an fp32 decides: C fuses products, and torch's square root is not always the
    nearest.
    """
    assert native.library()[0] is not None, native.library()[1]
    monkeypatch.setattr(rules, "compiled", lambda signature: pytest.fail("the C rule was not used"))
    one, other = both(summation=summation, variance=variance)
    assert_alike(one, other, 0.99 if summation == "split" else 0.998)  # `lower` are bits 8 .. 15 of an fp32


@needs_cc
@pytest.mark.parametrize("tuned", [(), ("-march=native",)])
def test_c_for_any_processor(tuned, monkeypatch, tmp_path):
    """The portable form of the C code, and the processor's own."""
    monkeypatch.setenv("IPU_LEAN_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "TUNED", (tuned,))
    native.library.cache_clear()
    try:
        one, other = both(summation="kahan")
        assert_alike(one, other, 0.998)
        assert len(list(tmp_path.glob("adamw-*.so"))) == 1 and len(list(tmp_path.iterdir())) == 1
    finally:
        native.library.cache_clear()


@needs_cc
def test_a_compiler_of_several_words(monkeypatch, tmp_path):
    """Such as `ccache gcc`."""
    wrapper = tmp_path / "wrapper"
    wrapper.write_text('#!/bin/sh\nexec "$@"\n', encoding="utf-8")
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", " ".join([str(wrapper), *native.compiler()]))
    monkeypatch.setenv("IPU_LEAN_CACHE", str(tmp_path / "cache"))
    native.library.cache_clear()
    try:
        assert native.library()[0] is not None, native.library()[1]
    finally:
        native.library.cache_clear()


@needs_cc
@pytest.mark.parametrize("summation", ["kahan", "split", "stochastic"])
def test_threads_change_no_bit(summation):
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        params, states = both(steps=2, summation=summation)[0]
        results.append(params + [tensor for state in states for tensor in state.values()])
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*results))


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_element_is_shared_out_once(threads):
    done = {length: [0] * length for length in (7, 640, 100, 5000, 64)}

    def call_of(length):
        def call(begin, end):
            assert begin % 64 == 0
            for place in range(begin, end):
                done[length][place] += 1

        return call

    shares = native.shared_out([(call_of(length), length) for length in done], threads)
    lengths = [sum(end - begin for _, begin, end in share) for share in shares]
    assert len(shares) == threads and max(lengths) - min(lengths) <= 64 * threads
    native._make([part for share in shares for part in share])
    assert all(set(counts) == {1} for counts in done.values())


@needs_torch_compile
@pytest.mark.parametrize("summation", ["kahan", "stochastic"])
def test_torch_compile_rounds_as_eager_code_does(summation, monkeypatch):
    """For types that the C rules do not have; one compilation for all sizes and rates."""
    monkeypatch.setattr(native, "usable", lambda *_: False)
    torch._dynamo.utils.counters.clear()
    one, other = both(summation=summation)
    assert_alike(one, other, 0.998)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 1


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(native, "usable", lambda *_: False)
    monkeypatch.setattr(_compat, "why_not_compiled", lambda device_type: "there is no C++ compiler")
    params = parameters(BF16)
    with pytest.raises(ConfigError, match="there is no C.. compiler"):
        run(AnyPrecisionAdamW(params, betas=(0.9, 0.95), compiled=True), params, 1)
    params = parameters(BF16)
    run(AnyPrecisionAdamW(params, betas=(0.9, 0.95)), params, 1)
    assert not torch.equal(params[0], parameters(BF16)[0])


def test_a_compiler_that_fails(monkeypatch, tmp_path, caplog):
    """It is named with what it said, leaves nothing behind, and the update goes on in eager code."""
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nprintf 'no such header \\351\\n' >&2\nexit 1\n", encoding="utf-8")  # in Latin 1
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("IPU_LEAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_compat, "why_not_compiled", lambda device_type: "there is no C++ compiler")
    native.library.cache_clear()
    try:
        assert native.library() == (None, f"{broken}: no such header \N{REPLACEMENT CHARACTER}")
        assert "goes on without its C code" in caplog.text and "no such header" in caplog.text
        assert os.listdir(tmp_path / "cache") == []
        params = parameters(BF16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(AnyPrecisionAdamW(params, betas=(0.9, 0.95)), params, 1)
    finally:
        native.library.cache_clear()


@needs_torch_compile
def test_a_compilation_that_fails_is_followed_by_eager_code(monkeypatch):
    def fail(*_):
        raise RuntimeError("the header is missing")

    monkeypatch.setattr(native, "usable", lambda *_: False)
    monkeypatch.setattr(rules, "compiled", lambda signature: fail)
    monkeypatch.setattr(rules, "is_compiled", lambda signature: False)
    params, others = parameters(BF16, SHAPES), parameters(BF16, SHAPES)
    options = {"betas": (0.9, 0.95), "summation": "kahan", "momentum_dtype": FP32}
    with pytest.warns(UserWarning, match="without compiled code .the header is missing"):
        run(AnyPrecisionAdamW(params, compiled=True, **options), params, 2)
    run(AnyPrecisionAdamW(others, compiled=False, **options), others, 2)
    assert all(torch.equal(a, b) for a, b in zip(params, others))
