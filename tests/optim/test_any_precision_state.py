"""State keeps its types and bits through saving, loading and copying; parameters become views only where that is safe."""
from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from ipu_lean import _compat
from ipu_lean.errors import ConfigError
from ipu_lean.mup import base_shapes_from_width, compute_roles
from ipu_lean.optim import AnyPrecisionAdamW, MuAdamW, group_settings, load_state
from tests.mup.toy import Toy
from tests.optim.test_any_precision import parameters, run

pytestmark = pytest.mark.pod
BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = ((200, 300), (7,), (64,), (64,), (33, 5))
VARIANTS = [
    {"summation": "kahan", "momentum_dtype": FP32, "betas": (0.9, 0.999)},
    {"summation": "kahan", "momentum_dtype": BF16, "betas": (0.9, 0.95), "compensation_buffer_dtype": FP32},
    {"summation": "split", "momentum_dtype": BF16, "betas": (0.9, 0.95)},
    {"summation": "stochastic", "momentum_dtype": BF16, "variance": "stochastic", "seed": 7},
    {"use_kahan_summation": True, "numerics": "published", "momentum_dtype": BF16},
]


def through_file(value):
    """What a checkpoint does: `torch.save`, then a load that runs no code."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("weights", [BF16, FP32])
@pytest.mark.parametrize("options", VARIANTS)
def test_training_goes_on_bit_for_bit(options, weights):
    """torch's own load_state_dict would cast every state to its parameter's type."""
    if options.get("numerics") == "published" and weights == FP32 and not _compat.mixes_types():
        pytest.skip("this torch cannot run torchdistx's operations on several types")
    one = parameters(weights, SHAPES)
    first = AnyPrecisionAdamW(one, lr=1e-3, weight_decay=0.1, **options)
    run(first, one, 5)
    two = [nn.Parameter(torch.empty_like(p).copy_(p)) for p in (q.detach() for q in one)]
    second = AnyPrecisionAdamW(two, lr=1e-3, weight_decay=0.1, **options)
    saved = through_file(first.state_dict())
    second.load_state_dict(saved)
    for p, q in zip(one, two):
        for key, value in first.state[p].items():
            held = second.state[q][key]
            assert held.dtype == value.dtype and torch.equal(held, value), key
    run(first, one, 5, start=5)
    run(second, two, 5, start=5)
    for p, q in zip(one, two):
        assert torch.equal(p, q)
        assert all(torch.equal(second.state[q][key], value) for key, value in first.state[p].items())
    # What was loaded belongs to the caller and did not move.
    for index, entry in saved["state"].items():
        assert float(entry["step"]) == 5, index


def test_settings_stay_as_built():
    """`load_state` brings back moments only."""

    def build(lr):
        torch.manual_seed(0)
        model = Toy(64)
        model.roles = compute_roles(model, base_shapes_from_width(Toy, 16))
        model.to(BF16)
        return model, MuAdamW(model, impl=AnyPrecisionAdamW, lr=lr, betas=(0.9, 0.95), momentum_dtype=BF16, summation="split")

    one, first = build(0.01)
    run(first, list(one.parameters()), 3)
    two, second = build(0.5)
    before = group_settings(second)
    load_state(second, through_file(first.state_dict()))
    assert group_settings(second) == before
    name = "head.weight"
    mine, theirs = (dict(model.named_parameters())[name] for model in (one, two))
    for key, value in first.state[mine].items():
        assert second.state[theirs][key].dtype == value.dtype and torch.equal(second.state[theirs][key], value)


def test_state_of_another_summation():
    """Nothing kept before: compensation starts at zero, which is exact. Something kept: refused, not dropped."""
    plain, kahan = parameters(BF16), parameters(BF16)
    without = AnyPrecisionAdamW(plain, summation="none", betas=(0.9, 0.95))
    run(without, plain, 2)
    with_it = AnyPrecisionAdamW(kahan, summation="kahan", betas=(0.9, 0.95))
    load_state(with_it, without.state_dict())
    run(with_it, kahan, 1)
    assert float(with_it.state[kahan[0]]["step"]) == 3 and "compensation" in with_it.state[kahan[0]]
    for other in ("none", "split", "stochastic"):
        params = parameters(BF16)
        optimizer = AnyPrecisionAdamW(params, summation=other, betas=(0.9, 0.95))
        load_state(optimizer, with_it.state_dict())
        with pytest.raises(ConfigError, match="keeps `compensation`"):
            run(optimizer, params, 1)


def test_copies_train_apart():
    model = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)).to(BF16)
    optimizer = AnyPrecisionAdamW(model.parameters(), betas=(0.9, 0.95), summation="split")
    run(optimizer, list(model.parameters()), 2)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    assert twin_optimizer.param_groups[0]["params"][0] is next(twin.parameters())
    run(optimizer, list(model.parameters()), 2, start=2)
    assert not torch.equal(model[0].weight, twin[0].weight)
    run(twin_optimizer, list(twin.parameters()), 2, start=2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_keep_how_they_are_computed(copied):
    model = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)).to(BF16)
    pair = (model, AnyPrecisionAdamW(model.parameters(), compiled=False, flatten=False))
    run(pair[1], list(model.parameters()), 1)
    twin, optimizer = copied(pair)
    run(optimizer, list(twin.parameters()), 1)
    assert optimizer.compiled is False and optimizer.flatten is False
    assert len(storages(twin.parameters())) == 4


def test_steps_of_other_types_count_on():
    """As other optimizers keep them."""
    params = parameters(BF16)
    optimizer = AnyPrecisionAdamW(params, betas=(0.9, 0.95))
    run(optimizer, params, 1)
    kept = optimizer.state_dict()
    for entry in kept["state"].values():
        entry["step"] = entry["step"].long()
    optimizer.load_state_dict(kept)
    run(optimizer, params, 1, start=1)
    assert all(state["step"] == 2 for state in optimizer.state.values())


def storages(params):
    return {p.untyped_storage().data_ptr() for p in params}


def test_parameters_share_one_buffer():
    """And stay what they were for everybody else: names, values, modules, weights files, a second optimizer."""
    model = nn.Sequential(nn.Linear(33, 40), nn.LayerNorm(40), nn.Linear(40, 7)).to(BF16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = AnyPrecisionAdamW(model.parameters(), betas=(0.9, 0.95))
    assert len(storages(model.parameters())) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.data_ptr() % 64 == next(model.parameters()).data_ptr() % 64 for p in model.parameters())
    loaded = load(save(dict(model.state_dict())))
    assert all(torch.equal(value, before[name]) for name, value in loaded.items())
    model(torch.ones(2, 33, dtype=BF16)).float().sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].bias, before["0.bias"]) and len(storages(model.parameters())) == 1
    again = AnyPrecisionAdamW(model.parameters(), betas=(0.9, 0.95))
    assert storages(model.parameters()) == storages([optimizer._plan[0][0].weights]) == storages([again._plan[0][0].weights])


def test_parameters_that_must_not_move():
    """Views of another tensor (as FSDP's are), shared memory, other layouts: updated where they are, with the same numbers."""
    whole = torch.randn(100).to(BF16)
    parts = [nn.Parameter(whole[:40]), nn.Parameter(whole[40:])]
    turned = nn.Parameter(torch.randn(6, 50).to(BF16).t())
    shared = nn.Parameter(torch.randn(30).to(BF16).share_memory_())
    params = [*parts, turned, shared]
    places = [p.data_ptr() for p in params]
    copies = [nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in params]
    options = {"betas": (0.9, 0.95), "momentum_dtype": BF16, "summation": "kahan", "weight_decay": 0.1}
    run(AnyPrecisionAdamW(params, **options), params, 4)
    flat = AnyPrecisionAdamW(copies, **options)
    run(flat, copies, 4)
    assert [p.data_ptr() for p in params] == places and len(storages(copies)) == 1
    assert all(torch.equal(a, b) for a, b in zip(params, copies))
    assert torch.equal(whole[:40], parts[0])


@pytest.mark.parametrize("summation", ["kahan", "split", "stochastic", "none"])
def test_flattening_changes_no_number(summation):
    one, two = parameters(BF16, SHAPES), parameters(BF16, SHAPES)
    options = {"betas": (0.9, 0.95), "momentum_dtype": BF16, "summation": summation, "seed": 3}
    run(AnyPrecisionAdamW(one, **options), one, 3)
    run(AnyPrecisionAdamW(two, flatten=False, **options), two, 3)
    assert all(torch.equal(a, b) for a, b in zip(one, two)) and len(storages(two)) == len(SHAPES)


def test_parameters_moved_by_others_are_found_again():
    model = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)).to(BF16)
    optimizer = AnyPrecisionAdamW(model.parameters(), betas=(0.9, 0.95), momentum_dtype=BF16)
    twin = copy.deepcopy(model)
    reference = AnyPrecisionAdamW(twin.parameters(), betas=(0.9, 0.95), momentum_dtype=BF16)
    for step in range(4):
        if step == 1:
            model[0].weight.data = model[0].weight.data.clone()
        if step == 2:  # a state from elsewhere, such as an engine's
            optimizer.state[model[1].bias] = {key: value.clone() for key, value in optimizer.state[model[1].bias].items()}
        run(optimizer, list(model.parameters()), 1, start=step)
        run(reference, list(twin.parameters()), 1, start=step)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    assert len(storages(model.parameters())) == 1
    optimizer.state.clear()
    run(optimizer, list(model.parameters()), 1)
    assert float(optimizer.state[model[1].bias]["step"]) == 1
    assert float(optimizer.state[model[1].bias]["exp_avg"].float().abs().max()) < 1


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("summation", ["kahan", "none"])
def test_a_backward_pass_that_reads_moved_weights_is_refused(summation, flatten):
    """As after a step of torch's optimizers: its gradients would be of no function."""
    weight = nn.Parameter(torch.eye(300).to(BF16))
    optimizer = AnyPrecisionAdamW([weight], betas=(0.9, 0.95), momentum_dtype=BF16, summation=summation, flatten=flatten)
    x = torch.ones(2, 300, dtype=BF16, requires_grad=True)
    late = (x @ weight).float().sum()
    (x @ weight).float().sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()
    (x @ weight).float().sum().backward()


def test_types_that_change_with_the_model():
    model = nn.Linear(10, 10)
    optimizer = AnyPrecisionAdamW(model.parameters(), betas=(0.9, 0.95))
    model.to(BF16)
    run(optimizer, list(model.parameters()), 2)
    assert "compensation" in optimizer.state[model.weight] and model.weight.dtype == BF16


def test_bytes_of_each_parameter():
    """What is alive besides gradients: storages, each counted once."""
    count, expected = 64 * 64 * 16, {"kahan": 8, "split": 8, "stochastic": 6, "none": 6}
    for summation, wanted in expected.items():
        params = parameters(BF16, ((count,),))
        optimizer = AnyPrecisionAdamW(params, betas=(0.9, 0.95), momentum_dtype=BF16, summation=summation)
        run(optimizer, params, 1)
        tensors = [*params, *(value for entry in optimizer.state.values() for value in entry.values() if value.dim())]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        assert sum(held.values()) == wanted * count
