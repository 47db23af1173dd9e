"""Hugging Face's GPT-2 with the same weights gives the same logits, losses and gradients."""

from __future__ import annotations

import pytest
import torch

from ipu_lean.models import TrainStep
from tests.models.common import tiny, tokens_for

transformers = pytest.importorskip("transformers", reason="the reference is transformers' GPT-2")


def pairs(ours, theirs):
    """(our name, their tensor or the slice of it that corresponds). Their Conv1D weights are [in, out]."""
    t = dict(theirs.transformer.named_parameters())
    yield "embedding.token.weight", t["wte.weight"]
    yield "embedding.position.weight", t["wpe.weight"]
    width = ours.spec.width
    for i in range(ours.spec.depth):
        attention, ffn = f"layers.blocks.{i}.branches.0", f"layers.blocks.{i}.branches.1"
        for place, part in enumerate(("query", "key", "value")):
            columns = slice(place * width, (place + 1) * width)
            yield f"{attention}.attention.{part}.linear.weight", t[f"h.{i}.attn.c_attn.weight"][:, columns].t()
            yield f"{attention}.attention.{part}.linear.bias", t[f"h.{i}.attn.c_attn.bias"][columns]
        for name, other in (
            (f"{attention}.attention.out", "attn.c_proj"),
            (f"{ffn}.feed_forward.up", "mlp.c_fc"),
            (f"{ffn}.feed_forward.down", "mlp.c_proj"),
        ):
            yield f"{name}.linear.weight", t[f"h.{i}.{other}.weight"].t()
            yield f"{name}.linear.bias", t[f"h.{i}.{other}.bias"]
        for kind in ("weight", "bias"):
            yield f"{attention}.norm.{kind}", t[f"h.{i}.ln_1.{kind}"]
            yield f"{ffn}.norm.{kind}", t[f"h.{i}.ln_2.{kind}"]
    for kind in ("weight", "bias"):
        yield f"norm.{kind}", t[f"ln_f.{kind}"]


@pytest.mark.parametrize("stack,depth", [("residual", 3), ("reversible", 1)])  # with one layer the two are one function
@pytest.mark.parametrize("attention", ["fused", "explicit", "torch"])
def test_gpt2_with_the_same_weights(stack, depth, attention):
    ours = tiny(positions="learned", depth=depth, stack={"kind": stack})
    ours.set_attention(attention)
    spec = ours.spec
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=spec.vocab,
            n_positions=spec.seq,
            n_embd=spec.width,
            n_layer=spec.depth,
            n_head=spec.heads,
            activation_function="gelu_new",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
    ).train()
    parameters = dict(ours.named_parameters())
    with torch.no_grad():
        found = dict(pairs(ours, theirs))
        assert set(found) == set(parameters)
        for name, tensor in found.items():
            tensor.copy_(parameters[name])
    tokens, labels = tokens_for(ours)
    expected = theirs(tokens.long()).logits
    assert (ours(tokens) - expected).norm() < 1e-5 * expected.norm()
    loss, sums = TrainStep(ours)(tokens, labels)
    reference = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten().long())
    assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
    check_gradients(ours, theirs, loss, reference)


def check_gradients(ours, theirs, loss, reference):
    loss.backward()
    for parameter in theirs.parameters():
        parameter.grad = None
    reference.backward()
    by_value = dict(pairs(ours, _Gradients(theirs)))
    for name, parameter in ours.named_parameters():
        truth = by_value[name]
        if name.endswith("key.linear.bias"):
            assert parameter.grad.abs().max() < 1e-6
        else:
            assert truth.norm() > 0 and (parameter.grad - truth).norm() < 1e-5 * truth.norm(), name


class _Gradients:
    """Looks like the peer, with gradients in place of parameters."""

    def __init__(self, model):
        self.transformer = self
        self._found = {name: parameter.grad for name, parameter in model.transformer.named_parameters()}

    def named_parameters(self):
        return self._found.items()
