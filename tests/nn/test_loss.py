"""The chunked loss: torch's cross entropy in double precision is the truth, memory and side effects are watched."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ipu_lean.nn import Embedding, FCLayer, PopReadout, TiedReadout, automatic_chunk, chunked_cross_entropy

pytestmark = pytest.mark.pod
WIDTH, VOCAB = 6, 11


def data(batch=3, seq=5, ignored=True):
    torch.manual_seed(0)
    h = torch.randn(batch, seq, WIDTH, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, VOCAB, (batch, seq), dtype=torch.int32)
    if ignored:
        labels[0, :3] = -100
        labels[1] = -100  # a whole chunk of 5 tokens
    return h, labels


def readouts():
    embedding = Embedding(VOCAB, WIDTH, std=1.0).double()
    holder = nn.ModuleList([embedding])
    return {
        "pop": PopReadout(WIDTH, VOCAB, base_width=2, output_mult=3.0).double(),
        "tied": TiedReadout(embedding, base_width=3),
        "linear": nn.Linear(WIDTH, VOCAB).double(),
        "nested": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), PopReadout(WIDTH, VOCAB)).double(),
        "fc": FCLayer(WIDTH, VOCAB, is_readout_layer=True, base_width=3).double(),
    }, holder


def reference(h, labels, readout):
    logits = readout(h).reshape(-1, VOCAB)
    target = labels.reshape(-1).long()
    losses = F.cross_entropy(logits, target, reduction="none", ignore_index=-100)
    kept = target != -100
    correct = (logits.argmax(-1) == target)[kept].sum()
    return losses.sum() / kept.sum(), torch.stack([losses.sum(), correct, kept.sum()])


def sources(readout):
    return list(readout.tensors()) if hasattr(readout, "tensors") else list(readout.parameters())


@pytest.mark.parametrize("name", ["pop", "tied", "linear", "nested", "fc"])
@pytest.mark.parametrize("chunk", [0, 1, 4, 5, 100])
@pytest.mark.parametrize("plain", [False, True])
def test_loss_sums_and_gradients(name, chunk, plain):
    found, _ = readouts()
    readout = found[name]
    h, labels = data()
    expected, sums = reference(h, labels, readout)
    loss, got = chunked_cross_entropy(h, labels, readout, chunk, plain)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    assert got.dtype == torch.float32 and not got.requires_grad
    assert got.tolist() == pytest.approx(sums.tolist(), rel=1e-6)
    wanted = [h, *sources(readout)]
    for ours, truth in zip(torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted)):
        assert truth.norm() > 0
        assert (ours - truth).norm() <= 1e-12 * truth.norm()


def test_nothing_to_predict_gives_zero():
    h, labels = data()
    for chunk in (0, 4):
        readout = nn.Linear(WIDTH, VOCAB).double()
        loss, sums = chunked_cross_entropy(h, torch.full_like(labels, -100), readout, chunk)
        loss.backward()
        assert loss.item() == 0 and sums.tolist() == [0, 0, 0]
        assert not h.grad.any() and not readout.weight.grad.any()


def test_frozen_readout_frozen_input_and_no_grad():
    readout = nn.Linear(WIDTH, VOCAB).double()
    h, labels = data()
    whole = torch.autograd.grad(chunked_cross_entropy(h, labels, readout, 0)[0], [h, readout.weight])
    readout.requires_grad_(False)
    (to_h,) = torch.autograd.grad(chunked_cross_entropy(h, labels, readout, 4)[0], [h])
    assert torch.allclose(to_h, whole[0], atol=1e-15)
    readout.weight.requires_grad_(True)  # the bias stays frozen
    loss, _ = chunked_cross_entropy(h.detach(), labels, readout, 4)
    (to_weight,) = torch.autograd.grad(loss, [readout.weight])
    assert torch.allclose(to_weight, whole[1], atol=1e-15)
    assert readout.weight.grad is None and h.grad is None  # autograd.grad leaves nothing behind
    with torch.no_grad():
        quiet, _ = chunked_cross_entropy(h, labels, readout, 4)
    assert not quiet.requires_grad and quiet.item() == pytest.approx(loss.item(), rel=1e-14)


def test_evaluation_takes_no_gradients():
    readout, (h, labels) = nn.Linear(WIDTH, VOCAB).double(), data()
    ops = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            ops.append(str(function))
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Record():
        chunked_cross_entropy(h, labels, readout, 4)
    products = [op for op in ops if "mm" in op]
    assert len(products) == 4  # 15 tokens in chunks of 4: one product each, none for gradients


def test_retained_graph_and_scaled_loss():
    readout = nn.Linear(WIDTH, VOCAB).double()
    h, labels = data()
    loss, _ = chunked_cross_entropy(h, labels, readout, 4)
    first = torch.autograd.grad(loss, [h, readout.weight], retain_graph=True)
    second = torch.autograd.grad(1000.0 * loss, [h, readout.weight])
    for a, b in zip(first, second):
        assert torch.allclose(1000 * a, b, rtol=1e-13)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_weights_get_both_gradients(tied):
    embedding = Embedding(VOCAB, WIDTH, std=1.0).double()
    readout = TiedReadout(embedding) if tied else PopReadout(WIDTH, VOCAB, bias=False).double()
    tokens = torch.randint(0, VOCAB, (2, 7))
    results = []
    for chunk in (0, 3):
        embedding.weight.grad = None
        chunked_cross_entropy(embedding(tokens), tokens, readout, chunk)[0].backward()
        results.append(embedding.weight.grad.clone())
    assert results[0].norm() > 0 and torch.allclose(results[0], results[1], rtol=1e-12)


class Watch(TorchDispatchMode):
    """The largest tensors made, and random numbers drawn."""

    def __init__(self):
        super().__init__()
        self.rows, self.vocab_products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == VOCAB:
            self.rows = max(self.rows, out.shape[0])
            self.vocab_products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return out


def test_logits_of_one_chunk_at_a_time_computed_once():
    readout = PopReadout(WIDTH, VOCAB).double()
    h, labels = data(4, 10)
    with Watch() as watch:
        chunked_cross_entropy(h, labels, readout, 8)[0].backward()
    assert watch.rows == 8  # never more rows of logits than a chunk, forward or backward
    assert watch.vocab_products == 5  # one product for each of the 5 chunks: nothing is computed twice


def test_dropout_in_a_readout_draws_once():
    readout = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, VOCAB)).double()
    h, labels = data(4, 10, ignored=False)
    torch.manual_seed(3)
    loss, _ = chunked_cross_entropy(h, labels, readout, 40 // 4)
    after = torch.get_rng_state()
    ours = torch.autograd.grad(loss, [h])[0]
    assert torch.equal(after, torch.get_rng_state())
    torch.manual_seed(3)
    plain, _ = chunked_cross_entropy(h, labels, readout, 40 // 4, plain=True)
    assert torch.allclose(ours, torch.autograd.grad(plain, [h])[0], rtol=1e-12, atol=1e-15)


def test_autocast_is_near_float32_and_accumulates_in_float32():
    torch.manual_seed(0)
    readout = PopReadout(32, 50, bias=False)
    h = torch.randn(4, 64, 32, requires_grad=True)
    labels = torch.randint(0, 50, (4, 64))
    exact = torch.autograd.grad(chunked_cross_entropy(h, labels, readout, 0)[0], [h, readout.weight])
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = chunked_cross_entropy(h, labels, readout, 16)
    assert loss.dtype == torch.float32
    for a, b in zip(torch.autograd.grad(loss, [h, readout.weight]), exact):
        assert a.dtype == torch.float32 and (a - b).norm() < 0.02 * b.norm()


def test_gradients_of_a_long_sequence_do_not_underflow_in_half():
    """The gradient of one token's logits is about 1/(vocabulary * tokens) when the mean comes first: below float16's range."""
    if not hasattr(torch, "float16"):
        pytest.skip("no float16")
    torch.manual_seed(0)
    readout = PopReadout(8, 16, bias=False)
    h, labels = torch.randn(1, 4096, 8), torch.randint(0, 16, (1, 4096))
    half = h.bfloat16().requires_grad_()
    low = PopReadout(8, 16, bias=False)
    low.load_state_dict(readout.state_dict())
    low = low.bfloat16()
    loss, _ = chunked_cross_entropy(half, labels, low, 512)
    gradient = torch.autograd.grad(loss, low.weight)[0]
    exact = torch.autograd.grad(chunked_cross_entropy(h, labels, readout, 0)[0], readout.weight)[0]
    assert gradient.dtype == torch.bfloat16 and (gradient.float() - exact).norm() < 0.03 * exact.norm()


def test_under_vmap_and_functional_grad():
    readout = PopReadout(WIDTH, VOCAB, bias=False).double()
    h, labels = data()
    weights = torch.stack([readout.weight.detach(), 2 * readout.weight.detach()])

    def loss(weight):
        return torch.func.functional_call(Wrapper(readout), {"inner.weight": weight}, (h.detach(), labels))

    got = torch.func.vmap(torch.func.grad(loss))(weights)
    for weight, gradient in zip(weights, got):
        own = PopReadout(WIDTH, VOCAB, bias=False).double()
        own.weight.data.copy_(weight)
        truth = torch.autograd.grad(reference(h.detach(), labels, own)[0], own.weight)[0]
        assert torch.allclose(gradient, truth, rtol=1e-12, atol=1e-14)


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, h, labels):
        return chunked_cross_entropy(h, labels, self.inner, 4)[0]


def test_functional_call_without_transforms_reaches_the_given_tensors():
    readout = PopReadout(WIDTH, VOCAB, bias=False).double()
    h, labels = data()
    given = (2 * readout.weight.detach()).requires_grad_()
    loss = torch.func.functional_call(Wrapper(readout), {"inner.weight": given}, (h, labels))
    assert torch.autograd.grad(loss, given)[0].norm() > 0


def test_automatic_chunks():
    assert automatic_chunk(4096, 257) == 0  # 4 MiB of logits
    chunk = automatic_chunk(65536, 50308)
    assert 0 < chunk * 50308 * 4 <= 32 * 2**20 < (chunk + 1) * 50308 * 4
    assert automatic_chunk(10, 10**9) == 1
