"""Whatever replaces parameters or copies the model leaves its forward pass, its roles and its base shapes as they were.

Each operation below makes a model of the mup package lose its width multipliers (or its ties) on at least one torch release.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from ipu_lean._compat import load_state_assign
from ipu_lean.models import TrainStep, build_meta
from tests.models.common import config_of, tiny, tokens_for

pytestmark = pytest.mark.pod
MUP = {"base_width": 8, "output_mult": 2.0}
KINDS = [{"tied": True}, {"tied": False}, {"tied": True, "positions": "sinusoidal", "num_hidden_groups": 1}]


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    options = {} if torch.__version__.startswith("2.0") else {"weights_only": False}
    return torch.load(buffer, **options)


def to_dtype_and_back(model):
    return copy.deepcopy(model).double().float()


def with_overwritten_parameters(model):
    """What PopTorch does while it traces: `.to` makes new parameter objects."""
    other = copy.deepcopy(model)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return other.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def meta_twin(model):
    keys = {"tied": model.spec.tied, "positions": model.spec.positions, "num_hidden_groups": model.spec.groups}
    return build_meta(config_of(MUP, **keys))


def from_meta_to_empty(model):
    other = meta_twin(model).to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    return other


def from_meta_by_assignment(model):
    other = meta_twin(model)
    load_state_assign(other, copy.deepcopy(model.state_dict()))
    return other


def by_assignment(model):
    other = copy.deepcopy(model)
    load_state_assign(other, copy.deepcopy(model.state_dict()))
    return other


def with_replaced_parameters(model):
    other = copy.deepcopy(model)
    for module in other.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    return other


def averaged(model):
    other = torch.optim.swa_utils.AveragedModel(model)
    other.update_parameters(model)
    return other.module


OPERATIONS = [
    copy.deepcopy,
    through_pickle,
    through_save,
    to_dtype_and_back,
    with_overwritten_parameters,
    from_meta_to_empty,
    from_meta_by_assignment,
    by_assignment,
    with_replaced_parameters,
    averaged,
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS, ids=["tied", "untied", "shared"])
def test_forward_roles_and_shapes_stay(operation, kind):
    model = tiny(MUP, **kind)
    tokens, labels = tokens_for(model)
    before, step = model(tokens), TrainStep(model)(tokens, labels)[0]
    assert all(role.m_in == 2.0 for role in model.roles.values() if role.kind == "hidden")
    other = operation(model)
    assert torch.equal(other(tokens), before)
    assert torch.equal(TrainStep(other)(tokens, labels)[0], step)
    assert other.roles == model.roles and other.base_shapes == model.base_shapes
    assert set(other.roles) == {name for name, _ in other.named_parameters()}
    if model.spec.tied:  # still one matrix: a change of the embedding changes the logits
        with torch.no_grad():
            other.embedding.token.weight[3] += 1.0
        assert not torch.equal(other(tokens[:, :1])[..., 3], before[:, :1, 3])
        assert torch.equal(model(tokens), before)  # and the original keeps its own


@pytest.mark.parametrize("kind", KINDS, ids=["tied", "untied", "shared"])
def test_functional_call_and_vmap(kind):
    models = [tiny(MUP, **kind) for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.1)
    tokens, _ = tokens_for(models[0])
    detached = {name: parameter.detach() for name, parameter in models[1].named_parameters()}
    assert torch.equal(torch.func.functional_call(models[0], detached, (tokens,)), models[1](tokens))
    stacked = {name: torch.stack([dict(model.named_parameters())[name].detach() for model in models]) for name in detached}
    template = copy.deepcopy(models[0])
    for engine in ("store", "invert"):
        template.layers.engine = engine
        with torch.no_grad():
            got = torch.func.vmap(lambda p: torch.func.functional_call(template, p, (tokens,)))(stacked)
        for model, logits in zip(models, got):
            assert torch.allclose(logits, model(tokens), rtol=1e-4, atol=1e-5)


def test_gradients_under_vmap_are_those_of_each_model():
    models = [tiny(MUP, seed=0), tiny(MUP, seed=0)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(0.9)
    tokens, labels = tokens_for(models[0])
    step = TrainStep(copy.deepcopy(models[0]))
    step.model.layers.engine = "store"  # the recomputing engine needs ordinary autograd
    names = [name for name, _ in step.named_parameters()]
    stacked = {name: torch.stack([dict(TrainStep(m).named_parameters())[name].detach() for m in models]) for name in names}

    def loss(parameters):
        return torch.func.functional_call(step, parameters, (tokens, labels))[0]

    got = torch.func.vmap(torch.func.grad(loss))(stacked)
    for place, model in enumerate(models):
        TrainStep(model)(tokens, labels)[0].backward()
        for name, parameter in TrainStep(model).named_parameters():
            assert parameter.grad.norm() > 0
            assert (got[name][place] - parameter.grad).norm() < 1e-4 * parameter.grad.norm(), name


def test_parametrised_and_pruned_readouts_run():
    from torch.nn.utils import prune

    model = tiny(MUP, tied=False)
    tokens, _ = tokens_for(model)
    before = model(tokens)
    prune.identity(model.readout, "weight")
    assert torch.equal(model(tokens), before)
    model = tiny(MUP, tied=False)
    nn.utils.weight_norm(model.readout)
    assert torch.allclose(model(tokens), before, atol=1e-5)


def test_reset_parameters_keeps_the_standard_deviations():
    model = tiny({"base_width": 8, "readout_zero_init": False, "query_zero_init": False}, width=64, vocab=500, tied=False)
    model.reset_parameters()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(model.roles[name].init_std, rel=0.1), name
