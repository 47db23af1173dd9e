"""Masked language models and classifiers against their formulas in float64, padding that nobody sees, and muP's view of them."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from ipu_lean.config import make_config
from ipu_lean.errors import ConfigError
from ipu_lean.models import Classifier, TrainStep, base_shapes_for, build_meta, build_model
from ipu_lean.models.heads import pool
from ipu_lean.nn import PopReadout, loss
from tests.models.by_hand import Hand
from tests.models.common import TINY, awake

pytestmark = pytest.mark.pod
CONCAT = {"kind": "reversible", "output": "concat"}
STANDARD = {"parametrization": "standard"}


def head_config(mup=None, memory=None, **model):
    """A tiny model that looks both ways."""
    sizes = {**TINY, "causal": False, "head": "classifier", **model}
    data = {"tokenizer": {"kind": "bpe", "path": "t"}}
    if sizes["head"] == "classifier":
        sizes.setdefault("classes", 3)
        data["labelled"] = "docs-or-code"
    return make_config(model=sizes, mup=mup or {"base_width": 8}, data=data, memory=memory or {})


def texts(seq=12):
    """Token rows of 12, 5 and 1 tokens padded with -1, and a class each."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, TINY["vocab"], (3, seq), generator=generator, dtype=torch.int32)
    for row, length in enumerate((seq, 5, 1)):
        tokens[row, length:] = -1
    return tokens, torch.tensor([2, 0, 1], dtype=torch.int32)


class Reader(Hand):
    """A model that looks both ways at the tokens that are there, by hand; -1 is padding."""

    def __init__(self, model, tokens):
        super().__init__(model, tokens.clamp(min=0))
        self.present = tokens >= 0

    def attention(self, x, name):
        spec = self.spec
        y = self.norm(x, f"{name}.norm")
        shape = (self.batch, self.seq, spec.heads, x.shape[-1] // spec.heads)
        q, k, v = (self.linear(y, f"{name}.attention.{part}").view(shape) for part in ("query", "key", "value"))
        if spec.positions == "rotary":
            q, k = self.turn(q), self.turn(k)
        rows = []
        for row in range(self.batch):
            seen = self.present[row].nonzero()[:, 0]
            scores = spec.attention_scale * torch.einsum("qhd,khd->hqk", q[row], k[row, seen])
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            rows.append(torch.einsum("hqk,khd->qhd", weights, v[row, seen]).flatten(1))
        y = self.linear(torch.stack(rows), f"{name}.attention.out")
        return spec.branch_mult * y

    def hidden(self):
        return self.norm(self.layers(self.embedded()), "norm")

    def classes(self):
        """[batch, classes]."""
        spec, p, h = self.spec, self.p, self.hidden()
        if spec.pooling == "first":
            pooled = h[:, 0]
        else:
            pooled = torch.stack([h[row, self.present[row]].mean(0) for row in range(self.batch)])
        dense = pooled @ p["readout.dense.linear.weight"].T
        dense = torch.tanh(dense + p["readout.dense.linear.bias"] if spec.bias else dense)
        found = spec.output_mult * dense / (spec.width / (spec.base_width or spec.width)) @ p["readout.projection.weight"].T
        return found + p["readout.projection.bias"] if spec.bias else found


def compare(model, by_hand, loss, wanted):
    """The gradients of both."""
    loss.backward()
    truth = torch.autograd.grad(wanted, [by_hand.p[name] for name, _ in model.named_parameters()])
    for (name, parameter), reference in zip(model.named_parameters(), truth):
        if name.endswith("key.linear.bias") and model.spec.positions != "rotary":
            assert parameter.grad.abs().max() < 1e-12  # adds one number to all scores of a query
            continue
        assert reference.norm() > 0
        assert (parameter.grad - reference).norm() < 1e-10 * reference.norm(), name


def alike(model):
    """The model in float64, and one whose parameters are leaves of their own for the reference."""
    model = awake(model).double()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize(
    "stack, positions, pooling, bias",
    [
        ({"kind": "residual"}, "rotary", "first", True),
        ({"kind": "reversible"}, "learned", "mean", True),
        (CONCAT, "sinusoidal", "first", True),
        (CONCAT, "rotary", "mean", False),
    ],
)
@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_a_classifier_is_its_formula(stack, positions, pooling, bias, attention):
    config = head_config({"base_width": 8, "output_mult": 1.5}, stack=stack, positions=positions, pooling=pooling, bias=bias)
    model, twin = alike(build_model(config, TINY["vocab"]))
    assert isinstance(model, Classifier)
    model.set_attention(attention)
    tokens, labels = texts()
    loss, sums = TrainStep(model)(tokens, labels)
    by_hand = Reader(twin, tokens)
    logits = by_hand.classes()
    assert torch.allclose(model(tokens), logits, rtol=1e-11, atol=1e-12)
    losses = torch.logsumexp(logits, -1) - logits[torch.arange(3), labels.long()]
    correct = (logits.argmax(-1) == labels).sum().item()
    assert sums.tolist() == pytest.approx([losses.sum().item(), correct, 3], rel=1e-6)
    assert loss.item() == pytest.approx(losses.mean().item(), rel=1e-12)
    compare(model, by_hand, loss, losses.mean())


@pytest.mark.parametrize("stack, tied", [({"kind": "residual"}, True), ({"kind": "reversible"}, False)])
@pytest.mark.parametrize("chunk", [0, 5])
def test_a_masked_lm_is_its_formula(stack, tied, chunk):
    config = head_config(head="masked-lm", stack=stack, tied=tied, memory={"loss_chunk": chunk})
    model, twin = alike(build_model(config, TINY["vocab"]))
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, TINY["vocab"], (2, 12), generator=generator, dtype=torch.int32)
    labels = torch.where(torch.rand(2, 12, generator=generator) < 0.3, tokens, torch.tensor(-100, dtype=torch.int32))
    loss, sums = TrainStep(model)(tokens, labels)
    by_hand = Reader(twin, tokens)
    logits = by_hand.logits()
    chosen = labels >= 0
    losses = (torch.logsumexp(logits, -1) - logits.gather(-1, tokens.long()[..., None])[..., 0])[chosen]
    assert 1 < len(losses) < 24 and sums[2] == len(losses)
    assert loss.item() == pytest.approx(losses.mean().item(), rel=1e-12)
    assert sums[1].item() == (logits.argmax(-1) == tokens)[chosen].sum().item()
    compare(model, by_hand, loss, losses.mean())


@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_padding_reaches_nothing(pooling, attention):
    """A text alone, without padding, has the logits that it has in a batch; a batch of whole rows needs no mask."""
    model = awake(build_model(head_config(STANDARD, pooling=pooling, dropout=0.1), TINY["vocab"])).double().eval()
    model.set_attention(attention)
    tokens, _ = texts()
    together = model(tokens)
    for row, length in enumerate((12, 5, 1)):
        assert torch.allclose(model(tokens[row : row + 1, :length])[0], together[row], rtol=1e-11, atol=1e-12)
    nothing = torch.full((1, 12), -1, dtype=torch.int32)
    assert torch.isfinite(model(nothing)).all()


def test_pooling():
    h = torch.arange(24.0).view(2, 3, 4)
    present = torch.tensor([[True, True, False], [False, False, False]])
    assert torch.equal(pool(h, present, "first"), h[:, 0])
    assert torch.allclose(pool(h, present, "mean"), torch.stack([h[0, :2].mean(0), torch.zeros(4)]))


def test_the_published_head_drops_before_the_dense_layer_and_after_it():
    head = awake(build_model(head_config(STANDARD, dropout=0.5), TINY["vocab"])).readout
    x = torch.ones(4000, TINY["width"])
    assert torch.equal(head.eval()(x), head(x))
    torch.manual_seed(0)
    dropped = head.train()(x)
    torch.manual_seed(0)
    keep = torch.nn.functional.dropout(x, 0.5)
    dense = torch.tanh(keep @ head.dense.linear.weight.T + head.dense.linear.bias)
    wanted = torch.nn.functional.dropout(dense, 0.5) @ head.projection.weight.T + head.projection.bias
    assert torch.allclose(dropped, wanted, atol=1e-5) and dropped.std(0).min() > 0


def test_a_large_vocabulary_does_not_cut_a_classifiers_batch_in_chunks(monkeypatch):
    """Its logits are classes: in chunks its dropout would draw other numbers, for nothing."""
    monkeypatch.setattr(loss, "LOGIT_BYTES", 4 * 2 * TINY["vocab"])  # two rows of the vocabulary's, a dozen of the classes'
    model, (tokens, labels) = awake(build_model(head_config(dropout=0.5))), texts()
    found = []
    for chunk in (None, 0):
        model.set_loss(chunk)
        torch.manual_seed(0)
        found.append(model.loss(model.hidden(tokens), labels)[0].item())
    assert found[0] == found[1]


def test_roles_and_starts():
    config = head_config({"base_width": 8}, width=32, stack=CONCAT)
    model = build_model(config, TINY["vocab"])
    roles = {name: (role.kind, role.m_in, role.m_out, role.forward_mult) for name, role in model.roles.items()}
    assert roles["readout.dense.linear.weight"] == ("hidden", 4, 4, 1)
    assert roles["readout.projection.weight"] == ("readout", 4, 1, 0.25)
    assert roles["readout.projection.bias"][0] == "vector" and roles["readout.projection.bias"][1] == 1
    assert roles["embedding.token.weight"][0] == "embedding"
    assert model.roles["readout.dense.linear.weight"].depth_mult == 1
    assert not model.readout.projection.weight.any() and isinstance(model.readout.projection, PopReadout)
    assert model.readout.dense.linear.weight.shape == (32, 64)
    assert model.readout.dense.linear.weight.std().item() == pytest.approx(1 / 8, rel=0.1)
    assert model.roles["readout.dense.linear.weight"].init_std == pytest.approx(1 / 8)
    standard = build_model(head_config(STANDARD), TINY["vocab"])
    assert standard.readout.projection.weight.any() and {role.m_in for role in standard.roles.values()} == {1}


def test_base_as_a_model_section_says_what_a_base_width_does():
    model = {"width": 32, "stack": CONCAT}
    one = build_model(head_config({"base_width": 8}, **model), TINY["vocab"])
    base = {**TINY, "width": 8, "causal": False, "head": "classifier", "stack": CONCAT}  # its classes are the target's
    other = build_model(head_config({"base": base}, **model), TINY["vocab"])
    assert one.roles == other.roles and one.base_shapes == other.base_shapes
    assert base_shapes_for(head_config(**model), TINY["vocab"])["readout.projection.weight"] == (None, 8)
    for changes in ({"pooling": "mean"}, {"head": "masked-lm", "tied": False}):
        with pytest.raises(ConfigError) as caught:
            build_model(head_config({"base": {**base, **changes}}, **model), TINY["vocab"])
        assert caught.value.key == f"mup.base.{next(iter(changes))}"


def test_the_masks_row():
    config = make_config(model={**TINY, "vocab": None, "head": "masked-lm", "causal": False}, mup=STANDARD)
    assert build_meta(config).spec.vocab == 258  # 256 bytes, end of text, mask
    with pytest.raises(ConfigError, match="257 pieces and the mask a row of its own") as caught:
        make_config(model={**TINY, "vocab": 257, "head": "masked-lm", "causal": False}, mup=STANDARD)
    assert caught.value.key == "model.vocab"
    with pytest.raises(ConfigError, match="24"):
        build_model(head_config(STANDARD, head="masked-lm"), TINY["vocab"] + 1)


def test_copies_half_precision_and_a_seeded_start():
    config = head_config(pooling="mean")
    model = awake(build_model(config, TINY["vocab"]))
    tokens, labels = texts()
    expected = model(tokens)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(tokens), expected) and twin.roles == model.roles
    half = copy.deepcopy(model).bfloat16()
    assert (half(tokens).float() - expected).norm() < 0.1 * expected.norm()
    model.reset_parameters()
    assert model.readout.dense.linear.weight.std().item() == pytest.approx(0.25, rel=0.2)
    loss, sums = TrainStep(model)(tokens, torch.full((3,), -100, dtype=torch.int32))
    assert loss.item() == 0 and sums.tolist() == [0, 0, 0]
    assert TrainStep(model)(tokens, labels)[0].item() == pytest.approx(math.log(3))  # the readout starts at zero


def test_blocks_are_the_forward_pass():
    model = awake(build_model(head_config(pooling="first", stack={"kind": "residual"}), TINY["vocab"]))
    tokens, _ = texts()
    whole = tokens[:1]  # no padding, so that the layers can be called one by one
    h = whole
    for block in model.blocks():
        h = block.module(h[:, 0] if block.kind == "head" else h)
    assert torch.allclose(h, model(whole), rtol=1e-5, atol=1e-6)
    assert [block.kind for block in model.blocks()] == ["embed", "layer", "layer", "norm", "head"]
    assert all(not block.ties for block in model.blocks())
    with pytest.raises(ConfigError, match="generates no text"):
        model.new_cache(1)
