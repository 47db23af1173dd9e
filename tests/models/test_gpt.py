"""The GPT against one written by hand in double precision, and what must hold of any causal model."""

from __future__ import annotations

import pytest
import torch

from ipu_lean.config import derived
from ipu_lean.errors import ConfigError
from ipu_lean.models import TrainStep, build_model
from tests.models.by_hand import Hand
from tests.models.common import config_of, tiny, tokens_for

pytestmark = pytest.mark.pod
MUP = {"base_width": 8}


VARIANTS = [
    {},
    {"stack": {"kind": "residual"}},
    {"stack": {"order": "aaff"}, "depth": 4},
    {"stack": {"kind": "residual", "order": "aaff"}},
    {"stack": {"output": "sum"}},
    {"stack": {"output": "mean"}},
    {"stack": {"output": "y"}},
    {"stack": {"output": "concat"}, "tied": False, "mup": MUP},
    {"stack": {"output": "gate"}},
    {"stack": {"output": "gate-channels"}, "mup": MUP},
    {"stack": {"input": "split"}, "mup": MUP},
    {"stack": {"input": "split", "output": "y"}, "tied": False, "sandwich": True, "mup": MUP},
    {"stack": {"input": "zeros"}},
    {"stack": {"coupling": "momentum"}, "depth": 3},
    {"stack": {"coupling": "momentum", "beta": 0.6, "order": "aaff", "input": "duplicate", "output": "y"}},
    {"stack": {"coupling": "modified-momentum", "beta": 0.7, "output": "y"}},
    {"stack": {"coupling": "modified-momentum", "output": "concat"}, "tied": False},
    {"stack": {"coupling": "mean", "order": "aaff"}, "depth": 4, "mup": MUP},
    {"stack": {"coupling": "mean", "index": "global", "output": "gate"}},
    {"stack": {"coupling": "affine"}, "depth": 4, "mup": MUP},
    {"stack": {"coupling": "affine", "input": "split"}, "sandwich": True, "tied": False, "mup": MUP},
    {"positions": "learned"},
    {"positions": "sinusoidal", "heads": 16},
    {"positions": "none", "bias": False},
    {"norm": "rmsnorm", "activation": "swiglu", "ffn_ratio": 1.5},
    {"sandwich": True, "activation": "relu", "norm_eps": 1e-3, "mup": {**MUP, "base_depth": 1}},
    {"activation": "geglu", "tied": False},
    {"depth": 6, "mup": MUP},
    {"activation": "reglu", "rotary_base": 100.0, "tied": False, "mup": MUP},
    {"activation": "silu", "mup": {**MUP, "output_mult": 3.0, "embedding_mult": 2.0, "attention_mult": 0.7}},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: ",".join(v) or "default")
def test_equals_the_model_written_by_hand(variant):
    model = tiny(**variant).double()
    tokens, _ = tokens_for(model)
    expected = Hand(model, tokens).logits()
    got = model(tokens)
    assert got.shape == (2, 12, 23)
    assert (got - expected).norm() <= 1e-12 * expected.norm()
    parameters = dict(model.named_parameters())
    truth = torch.autograd.grad(expected.pow(2).sum(), list(parameters.values()), allow_unused=True)
    ours = torch.autograd.grad(got.pow(2).sum(), list(parameters.values()))
    for name, a, b in zip(parameters, ours, truth):
        if b is None or (name.endswith("key.linear.bias") and model.spec.positions != "rotary"):
            assert a.abs().max() < 1e-8, name  # a dead last branch, or a bias that the softmax does not see
        else:
            assert b.norm() > 0 and (a - b).norm() <= 1e-10 * b.norm(), name


@pytest.mark.parametrize("stack", [{"kind": "residual"}, {"kind": "reversible"}, {"order": "aaff"}], ids=lambda s: str(s))
@pytest.mark.parametrize("attention", ["explicit", "fused"])
def test_the_future_is_not_seen(stack, attention):
    model = tiny(stack=stack, attention=attention)
    tokens, _ = tokens_for(model, batch=1)
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 23
    difference = (model(changed) - model(tokens)).abs().amax(-1)[0]
    assert difference[:6].max() == 0 and difference[6:].min() > 0


@pytest.mark.parametrize("positions", ["rotary", "learned", "sinusoidal", "none"])
@pytest.mark.parametrize("pieces", [[1] * 12, [5, 1, 2, 4], [12]])
def test_cached_logits_equal_whole_ones(positions, pieces):
    model = tiny(positions=positions, num_hidden_groups=1).double().eval()
    tokens, _ = tokens_for(model)
    cache, parts, start = model.new_cache(2), [], 0
    with torch.no_grad():
        for count in pieces:
            parts.append(model.logits(tokens[:, start : start + count], cache))
            start += count
        whole = model.logits(tokens)
        assert torch.allclose(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)
        assert torch.allclose(model.logits(tokens, last=True), whole[:, -1:], rtol=1e-12)
    with pytest.raises(ConfigError):
        model.logits(tokens[:, :1], cache)


def test_cache_under_autocast():
    model = tiny().eval()
    tokens, _ = tokens_for(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = model.new_cache(2)
        parts = torch.cat([model.logits(tokens[:, i : i + 1], cache) for i in range(12)], 1)
        whole = model.logits(tokens)
    assert (parts.float() - whole.float()).norm() < 0.05 * whole.float().norm()


def test_dropout_only_in_training():
    tokens = None
    for key in ("dropout", "attention_dropout", "embedding_dropout"):
        model, reference = tiny(**{key: 0.3}), tiny()
        tokens, _ = tokens_for(model)
        assert not torch.equal(model(tokens), model(tokens)), key
        model.eval()
        assert torch.equal(model(tokens), reference(tokens)), key


def parameters_by_formula(model):
    """Counted from the paper's shapes."""
    d, f, layers = model.width, derived.ffn_width(model), derived.groups(model) * model.num_inner_groups
    norm = d * (2 if model.norm == "layernorm" else 1)
    b = 1 if model.bias else 0
    matrices = 3 if model.activation.endswith("glu") else 2
    ffn = matrices * d * f + b * ((matrices - 1) * f + d)
    layer = 4 * (d * d + b * d) + ffn + norm * (4 if model.sandwich else 2)
    total = model.vocab * d * (1 if model.tied else 2) + layers * layer + norm
    return total + (model.seq * d if model.positions == "learned" else 0)


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"depth": 6, "num_hidden_groups": 2},
        {"depth": 6, "num_hidden_groups": 1, "num_inner_groups": 3},
        {"depth": 8, "num_inner_groups": 2},
        {"depth": 8, "num_inner_groups": 2, "stack": {"order": "aaff"}},
        {"depth": 7, "num_hidden_groups": 3, "stack": {"kind": "residual"}},
        {"depth": 8, "num_hidden_groups": 2, "num_inner_groups": 2, "stack": {"order": "aaff"}},
        {"sandwich": True, "norm": "rmsnorm", "bias": False, "tied": False, "activation": "geglu", "positions": "learned"},
    ],
)
def test_shared_layers_count_once_and_run_depth_times(variant):
    config = config_of(**variant)
    model = build_model(config)
    assert sum(p.numel() for p in model.parameters()) == parameters_by_formula(config.model)
    layers = [block for block in model.blocks() if block.kind == "layer"]
    assert sum(block.layers for block in layers) == config.model.depth
    calls = []
    for block in set(model.layers.executed()):
        block.register_forward_hook(lambda *_: calls.append(1))
    tokens, labels = tokens_for(model)
    with torch.no_grad():
        TrainStep(model)(tokens, labels)
    assert len(calls) == len(layers)
    keys = [key for key in model.state_dict() if not key.endswith("_extra_state")]
    assert sorted(keys) == sorted(name for name, _ in model.named_parameters())


def test_visits_walk_through_groups_in_order():
    model = build_model(config_of(depth=10, num_hidden_groups=2, num_inner_groups=2))
    order = [id(block.module) for block in model.blocks() if block.kind == "layer"]
    names = {identity: number for number, identity in enumerate(dict.fromkeys(order))}
    assert [names[identity] for identity in order] == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3]  # visits 0, 1, 2 | 3, 4


def test_blocks_name_every_stop_and_their_ties():
    model = build_model(config_of(depth=4, num_hidden_groups=2))
    blocks = model.blocks()
    assert [block.name for block in blocks] == ["embed", "layer0", "layer1", "layer2", "layer3", "norm", "head"]
    assert [block.kind for block in blocks] == ["embed"] + ["layer"] * 4 + ["norm", "head"]
    assert [block.ties for block in blocks] == [("head",), ("layer1",), ("layer0",), ("layer3",), ("layer2",), (), ("embed",)]
    called = []
    for module in dict.fromkeys(block.module for block in blocks):
        module.register_forward_hook(lambda module, *_: called.append(module))
    tokens, labels = tokens_for(model)
    with torch.no_grad():
        TrainStep(model)(tokens, labels)
    assert called == [block.module for block in blocks]
    untied = build_model(config_of(tied=False)).blocks()
    assert not any(block.ties for block in untied)


def test_embed_stack_norm_and_loss_are_the_step():
    model = tiny()
    tokens, labels = tokens_for(model)
    h = model.norm(model.stack(model.embed(tokens)))
    assert torch.equal(h, model.hidden(tokens))
    loss, sums = TrainStep(model)(tokens, labels)
    assert torch.equal(loss, model.loss(h, labels)[0])
    logits = model(tokens).double()
    truth = -torch.log_softmax(logits, -1).gather(-1, labels.long()[..., None]).sum().item()
    right = (logits.argmax(-1) == labels).sum().item()
    assert sums.tolist() == pytest.approx([truth, right, 24], rel=1e-5)
    assert loss.item() == pytest.approx(truth / 24, rel=1e-5)
    assert TrainStep(model).sum_names == ("loss", "correct", "tokens") and sums.dtype == torch.float32


def test_chunked_loss_and_engines_change_no_number():
    reference = None
    for engine in ("store", "invert", "checkpoint"):
        for chunk in (0, 5, None):
            model = tiny(memory={"engine": engine, "loss_chunk": chunk}).double()
            tokens, labels = tokens_for(model)
            labels[0, :4] = -100
            loss, sums = TrainStep(model)(tokens, labels)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            if reference is None:
                reference = (loss, sums, gradients)
            assert loss.item() == pytest.approx(reference[0].item(), rel=1e-12)
            assert sums.tolist() == pytest.approx(reference[1].tolist())
            for a, b in zip(gradients, reference[2]):
                assert b.norm() > 0 and (a - b).norm() <= 1e-10 * b.norm()


def test_explicit_attention_and_plain_loss_by_switch():
    model = tiny(attention="fused")
    tokens, labels = tokens_for(model)
    before, _ = TrainStep(model)(tokens, labels)
    model.set_attention("explicit")
    model.set_loss(chunk=5, plain=True)
    after, _ = TrainStep(model)(tokens, labels)
    assert after.item() == pytest.approx(before.item(), rel=1e-6)
    assert {m.implementation for m in model.modules() if hasattr(m, "implementation")} == {"explicit"}


def test_a_mask_reaches_every_attention():
    model = tiny().double()
    tokens, _ = tokens_for(model)
    mask = torch.ones(2, 1, 1, 12, dtype=torch.bool)
    mask[:, ..., :3] = False  # the first three tokens are padding
    changed = tokens.clone()
    changed[:, :3] = (changed[:, :3] + 1) % 23
    assert torch.equal(model.logits(tokens, mask=mask)[:, 3:], model.logits(changed, mask=mask)[:, 3:])
    assert not torch.equal(model.logits(tokens)[:, 3:], model.logits(changed)[:, 3:])


@pytest.mark.parametrize("wrong", ["long", "long cache", "no cache", "attention", "chunk"])
def test_mistakes(wrong):
    model = tiny()
    tokens = torch.zeros(1, 13, dtype=torch.int32)
    with pytest.raises(ConfigError):
        {
            "long": lambda: model(tokens),
            "long cache": lambda: model.new_cache(1, 13),
            "no cache": lambda: model.new_cache(1, 0),
            "attention": lambda: model.set_attention("auto"),
            "chunk": lambda: model.set_loss(-1),
        }[wrong]()
