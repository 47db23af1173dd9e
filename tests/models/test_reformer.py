"""A GPT with hashed and local attention: reversible in every case, with sequences of any length, padded or not."""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch

from ipu_lean._compat import TORCH
from ipu_lean.config import make_config
from ipu_lean.errors import ConfigError
from ipu_lean.models import TrainStep, build_meta, build_model
from ipu_lean.models.reformer import hashing
from ipu_lean.optim import explain_model
from tests.models.common import config_of, tokens_for

pytestmark = pytest.mark.pod

LAYERS = {
    "attention": ["local", "lsh"], "local": {"chunk": 4}, "lsh": {"chunk": 4, "hashes": 4}, "positions": "axial", "seq": 32,
    "tied": False, "attention_bias": False, "readout_bias": True, "stack": {"output": "concat"}, "depth": 4,
}  # fmt: skip


def reformer(dtype=torch.float64, **changes):
    """A small Reformer in which nothing is zero."""
    model = build_model(config_of(**{**LAYERS, **changes}))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = 1.0 if name.endswith("norm.weight") or "norm_after.weight" in name else 0.0
            parameter.copy_(gain + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def gradients(model, tokens, labels, seed=0, **given):
    """Loss and gradients by name."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss, _ = model.loss(model.hidden(tokens, **given), labels)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(found, truth):
    """The largest relative difference of a tensor; none of the truth is zero."""
    assert set(found) == set(truth)
    assert all(value.norm() > 0 for value in truth.values())
    return max(float((found[name] - value).norm() / value.norm()) for name, value in truth.items())


# -- reversible equals plain -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("length", [32, 13])
def test_reversible_equals_plain_with_dropout_and_four_rounds(dtype, limit, length):
    """Sizes are near the published ones, embeddings of 1 and small matrices: rounding is undone relative to the streams."""
    model = reformer(dtype, depth=8, dropout=0.5, attention_dropout=0.1, embedding_dropout=0.1).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(3.0 if name.startswith("embedding") else 0.3)
    tokens, labels = tokens_for(model, seq=length)
    model.set_engine("store")
    plain, truth = gradients(model, tokens, labels)
    for engine in ("invert", "checkpoint"):
        model.set_engine(engine)
        loss, found = gradients(model, tokens, labels)
        assert loss == plain
        assert worst(found, truth) < limit


def test_two_forward_passes_and_a_new_draw_before_one_backward_pass():
    """Each call's backward pass runs with the buckets and the dropout of its own."""
    model = reformer(dropout=0.3).train()
    model.set_engine("store")
    truth = {}
    for step, seed in ((3, 1), (4, 2)):
        model.redraw(step)
        for name, value in gradients(model, *tokens_for(model, seed=seed), seed=seed)[1].items():
            truth[name] = truth.get(name, 0) + value
    model.set_engine("invert")
    model.zero_grad(set_to_none=True)
    losses = []
    for step, seed in ((3, 1), (4, 2)):
        model.redraw(step)
        tokens, labels = tokens_for(model, seed=seed)
        torch.manual_seed(seed)
        losses.append(model.loss(model.hidden(tokens), labels)[0])
    model.redraw(9)
    torch.manual_seed(77)
    (losses[0] + losses[1]).backward()
    assert worst({name: p.grad for name, p in model.named_parameters()}, truth) < 1e-12


def test_what_is_almost_a_tie_hashes_alike_in_both_runs():
    """Rounding in the second run would put such tokens elsewhere: here all directions are nearly one, in bf16."""
    model = reformer(torch.float32).to(torch.bfloat16).train()
    torch.manual_seed(0)
    with torch.no_grad():
        for attention in hashing(model):
            attention.rotations.mul_(0.02).add_(torch.randn(attention.rotations.shape[:3]).unsqueeze(-1))
    tokens, labels = tokens_for(model)
    seen = []
    for attention in hashing(model):
        order = attention.order_of

        def kept(*args, order=order):
            found = order(*args)
            seen.append(found[0].clone())
            return found

        attention.order_of = kept
    gradients(model, tokens, labels)
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(first) == 2 and all(torch.equal(a, b) for a, b in zip(first, reversed(second)))


# -- what users met elsewhere ------------------------------------------------------------------------------------------------
def test_frozen_embeddings_leave_the_layers_their_gradients():
    model = reformer().train()
    tokens, labels = tokens_for(model)
    _, truth = gradients(model, tokens, labels)
    model.embedding.requires_grad_(False)
    _, found = gradients(model, tokens, labels)
    assert len(found) == len(truth) - 3
    assert worst(found, {name: truth[name] for name in found}) < 1e-12


def test_autograd_grad_and_a_backward_pass_in_eval_mode():
    model = reformer(dropout=0.5).eval()
    tokens, labels = tokens_for(model)
    names, parameters = zip(*model.named_parameters())
    loss, _ = model.loss(model.hidden(tokens), labels)
    found = dict(zip(names, torch.autograd.grad(loss, parameters)))
    model.set_engine("store")
    assert worst(found, gradients(model, tokens, labels)[1]) < 1e-12


def test_random_numbers_of_the_caller_are_left_alone():
    model = reformer().train()
    tokens, labels = tokens_for(model)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model.redraw(2)
    model.loss(model.hidden(tokens), labels)[0].backward()
    assert torch.equal(torch.rand(3), expected)
    dropping = reformer(dropout=0.5).train()
    assert gradients(dropping, tokens, labels, seed=3)[0] == gradients(dropping, tokens, labels, seed=3)[0]


def test_any_length_after_any_other():
    """Nothing is kept of an earlier sequence: neither its buckets nor its length."""
    model, fresh = reformer().eval(), reformer().eval()
    long, _ = tokens_for(model)
    for length in (32, 16, 5, 21, 1, 32):
        with torch.no_grad():
            assert torch.equal(model(long[:, :length]), copy.deepcopy(fresh)(long[:, :length]))


def test_a_sequence_within_one_chunk_is_not_padded():
    model = reformer(lsh={"chunk": 4, "full_below": 8}, local={"chunk": 8})
    widths = []
    model.layers.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    for length in (3, 5, 8, 9, 17):
        model(tokens_for(model, seq=length)[0])
    assert widths == [3, 5, 8, 16, 24]


def test_more_rounds_for_an_evaluation():
    model, four = reformer(lsh={"chunk": 4}).eval(), reformer(lsh={"chunk": 4, "hashes": 4}).eval()
    tokens, _ = tokens_for(model)
    before = model(tokens)
    model.set_hashes(4)
    assert torch.equal(model(tokens), four(tokens)) and not torch.equal(model(tokens), before)
    model.set_hashes(1)
    assert torch.equal(model(tokens), before)
    with pytest.raises(ConfigError, match="at least one"):
        model.set_hashes(0)
    with pytest.raises(ConfigError, match="no layer"):
        reformer(attention="local", lsh={}).set_hashes(2)


# -- padding -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["full", "local", "lsh", "mixed"])
def test_padding_never_reaches_a_token(kind):
    kinds = ["local", "lsh", "full", "lsh"] if kind == "mixed" else kind
    changes = {name: {} for name in ("local", "lsh") if kind not in (name, "mixed")}
    model = reformer(attention=kinds, **changes).train()
    tokens, labels = tokens_for(model, batch=4)
    present = torch.ones(4, 32, dtype=torch.bool)
    present[0, 20:] = present[1, :9] = present[2, 5:11] = present[3] = False
    labels = labels.masked_fill(~present, -100)
    other = tokens.masked_fill(~present, 3)
    loss, truth = gradients(model, tokens, labels, present=present)
    again, found = gradients(model, other, labels, present=present)
    assert again == pytest.approx(loss, rel=1e-13)
    token = "embedding.token.weight"
    for name, value in truth.items():
        assert torch.isfinite(value).all()
        rest = value if name != token else value[torch.unique(tokens[present])]
        same = found[name] if name != token else found[name][torch.unique(tokens[present])]
        assert (rest - same).norm() < 1e-12 * rest.norm(), name
    out = model.eval()(tokens)
    assert torch.isfinite(out).all()


def test_a_padded_sequence_trains_as_one_that_was_padded_by_hand():
    model = reformer().train()
    tokens, labels = tokens_for(model, seq=21)
    loss, truth = gradients(model, tokens, labels)
    present = torch.arange(24).expand(2, 24) < 21
    more = torch.cat([tokens, tokens[:, :3]], 1)
    again, found = gradients(model, more, torch.cat([labels, torch.full_like(labels[:, :3], -100)], 1), present=present)
    assert again == pytest.approx(loss, rel=1e-13) and worst(found, truth) < 1e-12


def test_present_is_a_bool_for_each_token():
    model = reformer()
    tokens, _ = tokens_for(model)
    for wrong in (torch.ones(2, 32), torch.ones(2, 31, dtype=torch.bool)):
        with pytest.raises(ConfigError, match="a bool for each"):
            model.hidden(tokens, present=wrong)
    with pytest.raises(ConfigError, match="queries by keys"):
        model.hidden(tokens, mask=torch.ones(1, 1, 32, 32, dtype=torch.bool))


# -- causality ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["full", "local", "one chunk"])
def test_no_token_sees_a_later_one(kind):
    changes = {"attention": kind, "local": {"chunk": 4} if kind == "local" else {}, "lsh": {}}
    if kind == "one chunk":
        changes.update(attention="lsh", lsh={"chunk": 4, "full_below": 32})
    model = reformer(**changes).eval()
    tokens, _ = tokens_for(model)
    before = model(tokens)
    for place in (1, 15, 31):
        other = tokens.clone()
        other[:, place:] = (other[:, place:] + 1) % 23
        after = model(other)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place], before[:, place])


# -- every pair of features --------------------------------------------------------------------------------------------------
AXES = {
    "attention": ["lsh", "local", ["local", "lsh"], ["full", "lsh"]],
    "positions": ["rotary", "learned", "sinusoidal", "axial", "none"],
    "coupling": ["additive", "momentum", "affine", "residual"],
    "shape": ["plain", "split", "aaff", "shared"],
    "size": ["own", "equal"],
    "gate": ["swiglu", "relu"],
    "norm": ["rmsnorm", "layernorm"],
}


def rows():
    """Few rows that hold every pair of values of two features."""
    names = list(AXES)
    missing = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x in range(len(AXES[a])) for y in range(len(AXES[b]))
    }
    found = []
    generator = torch.Generator().manual_seed(0)
    while missing:
        best, gain = None, -1
        for _ in range(30):
            row = {name: int(torch.randint(len(AXES[name]), (), generator=generator)) for name in names}
            pairs = {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}
            if len(pairs & missing) > gain:
                best, gain = (row, pairs), len(pairs & missing)
        found.append({name: AXES[name][place] for name, place in best[0].items()})
        missing -= best[1]
    return found


def settings(row):
    """The model section of a row; what cannot go together gives way."""
    stack = {"kind": "residual"} if row["coupling"] == "residual" else {"coupling": row["coupling"]}
    changes = {"attention": row["attention"], "positions": row["positions"], "activation": row["gate"], "norm": row["norm"]}
    if row["coupling"] != "residual":
        split = row["shape"] == "split" and row["coupling"] == "additive"
        stack.update({"input": "split", "output": "concat"} if split else {})
        stack.update({"order": "aaff"} if row["shape"] == "aaff" else {})
    if row["shape"] == "shared":
        changes.update(num_hidden_groups=1, num_inner_groups=2)
    if row["size"] == "own":
        changes.update(heads=3, head_size=4)
    used = row["attention"] if isinstance(row["attention"], list) else [row["attention"]]
    changes.update(lsh={"chunk": 4, "hashes": 2} if "lsh" in used else {}, local={"chunk": 8} if "local" in used else {})
    return {**changes, "stack": stack, "readout_bias": True}


@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join(str(value) for value in row.values()))
def test_features_go_together(row):
    model = reformer(**settings(row)).train()
    tokens, labels = tokens_for(model, seq=19)
    present = torch.arange(19).expand(2, 19) < torch.tensor([[19], [11]])
    model.set_engine("store")
    loss, truth = gradients(model, tokens, labels, present=present)
    model.set_engine("checkpoint" if row["coupling"] == "residual" else "invert")
    again, found = gradients(model, tokens, labels, present=present)
    assert again == pytest.approx(loss, rel=1e-13) and worst(found, truth) < 1e-10
    model.set_attention("explicit")
    explicit, found = gradients(model, tokens, labels, present=present)
    assert explicit == pytest.approx(loss, rel=1e-12) and worst(found, truth) < 1e-9


# -- precisions --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    if dtype == torch.float16 and TORCH < (2, 6):
        pytest.skip("this torch has no fp16 autocast on CPU")
    model = reformer(torch.float32).train()
    tokens, labels = tokens_for(model)
    present = torch.ones(2, 32, dtype=torch.bool)
    present[0, 25:] = False
    found = {}
    for engine in ("invert", "store"):
        model.set_engine(engine)
        with torch.autocast("cpu", dtype=dtype):
            loss, found[engine] = gradients(model, tokens, labels, present=present)
        assert all(torch.isfinite(value).all() for value in found[engine].values())
    assert worst(found["invert"], found["store"]) < 4 * torch.finfo(dtype).eps  # rare flips of a rounding
    model.set_attention("explicit")
    with torch.autocast("cpu", dtype=dtype):
        explicit, _ = gradients(model, tokens, labels, present=present)
    assert explicit == pytest.approx(loss, rel=4 * torch.finfo(dtype).eps)
    if dtype == torch.bfloat16:
        half = copy.deepcopy(model).to(dtype)
        _, pure = gradients(half, tokens, labels, present=present)
        assert all(torch.isfinite(value).all() and value.dtype == dtype for value in pure.values())


# -- parametrisation ---------------------------------------------------------------------------------------------------------
def wide(width=64, **model):
    sizes = {"width": width, "heads": 4, "depth": 2, "vocab": 50, "seq": 32, **LAYERS, **model}
    return make_config(model=sizes, mup={"base_width": 16}, data={"tokenizer": {"kind": "bpe", "path": "t"}})


def test_roles_of_a_reformer():
    model = build_model(wide())
    roles = model.roles
    for table in ("embedding.token.weight", "embedding.position.rows", "embedding.position.columns"):
        assert roles[table].kind == "embedding" and roles[table].init_std == 0.1
    shared = "layers.blocks.1.branches.0.attention.query_key.linear.weight"
    assert roles[shared].kind == "hidden" and (roles[shared].m_in, roles[shared].m_out) == (4.0, 4.0)
    assert roles[shared].init_std == 64**-0.5 and dict(model.named_parameters())[shared].abs().max() > 0
    query = "layers.blocks.0.branches.0.attention.query.linear.weight"
    assert roles[query].init_std == 0.0 and not dict(model.named_parameters())[query].any()
    assert roles["readout.weight"].kind == "readout" and roles["readout.weight"].m_in == 4.0
    assert roles["readout.bias"].kind == "vector"
    rows = {row["name"]: row for row in explain_model(model, wide())}
    assert rows[shared]["lr"] == pytest.approx(rows["embedding.position.rows"]["lr"] / 4) and rows[shared]["init_std"] > 0


def test_scores_of_aligned_vectors_do_not_grow_with_the_head():
    """|q| grows as sqrt(head size) with vectors that align; the keys have unit length."""
    assert build_meta(wide(64)).spec.lsh.score_mult == pytest.approx((4 / 16) ** 0.5)
    assert build_meta(wide(16)).spec.lsh.score_mult == 1.0
    assert build_meta(wide(64, heads=None, head_size=4)).spec.lsh.score_mult == 1.0


def test_axial_vectors_given_as_numbers_grow_with_the_width():
    model = build_meta(wide(axial={"dims": [32, 32]}))
    assert model.base_shapes["embedding.position.rows"] == (None, None, 8)
    assert model.roles["embedding.position.rows"].m_in == 1.0


def test_a_base_given_as_a_whole():
    base = {**LAYERS, "width": 16, "heads": 2, "head_size": 4, "seq": 32}
    config = make_config(
        model={**LAYERS, "width": 32, "heads": 2, "head_size": 8, "vocab": 50},
        mup={"base": base},
        data={"tokenizer": {"kind": "bpe", "path": "t"}},
    )
    model = build_model(config)
    hashed = "layers.blocks.1.branches.0.attention"
    assert model.base_shapes[f"{hashed}.query_key.linear.weight"] == (8, 16)
    assert model.roles[f"{hashed}.out.linear.weight"].m_in == 2.0
    changes = {"attention": {"attention": "local", "lsh": {}}, "axial.shape": {"seq": 64}}
    for key, change in [*changes.items(), ("readout_bias", {"readout_bias": False})]:
        other = config.model_copy(update={"mup": config.mup.model_copy(update={"base": _section({**base, **change})})})
        with pytest.raises(ConfigError) as raised:
            build_model(other)
        assert raised.value.key == f"mup.base.{key}"


def _section(values):
    from ipu_lean.config import ModelConfig

    return ModelConfig.model_validate(values)


def test_streams_and_gradients_do_not_grow_with_depth():
    """Reversible stacks elsewhere explode with depth; CompleteP's multipliers keep both sizes."""
    sizes = []
    for depth in (4, 32):
        torch.manual_seed(0)
        config = wide(16, depth=depth)
        model = build_model(config.model_copy(update={"mup": config.mup.model_copy(update={"query_zero_init": False})}))
        with torch.no_grad():
            model.readout.weight.normal_(0.0, 0.25)
        tokens, labels = tokens_for(model)
        h = model.embed(tokens)
        streams = torch.cat(model.streams(h), -1)
        _, found = gradients(model, tokens, labels)
        sizes.append((float(streams.detach().square().mean().sqrt()), float(found["embedding.token.weight"].norm())))
    assert all(deep < 2.0 * flat for flat, deep in zip(*sizes)), sizes


# -- the module as a thing ---------------------------------------------------------------------------------------------------
def test_draws_are_a_function_of_seed_layer_and_step():
    model = reformer(attention="lsh", local={})
    drawn = [attention.rotations.clone() for attention in hashing(model)]
    assert len(drawn) == 4 and not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))
    model.redraw(5)
    assert not any(torch.equal(attention.rotations, old) for attention, old in zip(hashing(model), drawn))
    model.redraw(0)
    assert all(torch.equal(attention.rotations, old) for attention, old in zip(hashing(model), drawn))
    other = reformer(attention="lsh", local={}, seed=1)
    assert not any(torch.equal(attention.rotations, old) for attention, old in zip(hashing(other), drawn))
    assert not any("rotations" in name for name in model.state_dict())


def test_a_copy_and_a_model_from_meta_are_the_same_model():
    model = reformer(torch.float32).eval()
    model.redraw(3)
    tokens, _ = tokens_for(model)
    expected = model(tokens)
    assert torch.equal(copy.deepcopy(model)(tokens), expected)
    fresh = build_meta(config_of(**LAYERS)).to_empty(device="cpu").eval()
    fresh.load_state_dict(model.state_dict())
    fresh.redraw(3)
    assert torch.equal(fresh(tokens), expected)


def test_step_runs_as_in_training():
    model = reformer(torch.float32)
    loss, sums = TrainStep(model)(*tokens_for(model))
    assert loss.isfinite() and sums.shape == (3,)


# -- memory ------------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(TORCH < (2, 1), reason="storages have no lasting Python object before torch 2.1")
def test_memory_does_not_grow_with_depth():
    """But for the order of the tokens in each hashed layer: two bytes a token, head and round."""
    from benchmarks._common import LiveBytes, parameters_and_gradients

    peaks = {}
    for engine, depth in itertools.product(("invert", "store"), (4, 12)):
        model = reformer(torch.float32, depth=depth, dropout=0.1, lsh={"chunk": 4, "hashes": 2}).train()
        model.set_engine(engine)
        tokens, labels = tokens_for(model, batch=4)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model.loss(model.hidden(tokens), labels)[0].backward()
        gc.collect()
        with LiveBytes(parameters_and_gradients(model) + list(model.buffers()) + [tokens, labels]) as live:
            model.loss(model.hidden(tokens), labels)[0].backward()
            peaks[engine, depth] = live.peak
    orders = 4 * 2 * 2 * 32 * 2
    states = 5056 * 2
    growth = peaks["invert", 12] - peaks["invert", 4]
    assert growth <= 4 * orders + 8 * states, peaks
    assert growth < 0.15 * (peaks["store", 12] - peaks["store", 4]), peaks
