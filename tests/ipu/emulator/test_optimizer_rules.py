"""What an optimizer's attributes may be and when they may change (docs/user_guide/overview.rst, Constant attributes)."""
from __future__ import annotations

import copy
import logging
from typing import Any, Dict

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch

from .common import Classifier, options, tokens
from .test_optimizers import X, model

pytestmark = pytest.mark.pod


def test_adamw_is_asked_before_adam() -> None:
    """python/_optimizer_attributes.py:273-349 with torch 2.13, where AdamW derives from Adam."""
    made = model()
    executor = poptorch.trainingModel(made, optimizer=torch.optim.AdamW(made.parameters(), lr=0.1))
    assert executor._converted.kind.name == "ADAMW"


def test_other_optimizers_are_refused_and_subclasses_warn(caplog: pytest.LogCaptureFixture) -> None:
    """python/_optimizer_attributes.py:273-349."""
    made = model()
    with pytest.raises(AssertionError, match="Unsupported optimizer type Adagrad"):
        poptorch.trainingModel(made, optimizer=torch.optim.Adagrad(made.parameters()))

    class Mine(poptorch.optim.Adam):
        pass

    poptorch.trainingModel(model(), optimizer=Mine(model().parameters(), lr=0.1))
    assert any("Mine" in record.getMessage() for record in caplog.records)


def test_validation() -> None:
    """python/_optimizer_attributes.py:67-71,333-338,389-391, python/optim.py:383-393: numbers, accumulator types, amsgrad."""
    made = model()
    with pytest.raises(AssertionError, match="accumulation types"):
        poptorch.optim.Adam(made.parameters(), accum_type=torch.bfloat16)
    with pytest.raises(ValueError, match="amsgrad"):
        poptorch.trainingModel(model(), optimizer=poptorch.optim.Adam(made.parameters(), amsgrad=True))
    tensor = torch.optim.Adam(made.parameters(), lr=0.1)
    tensor.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(AssertionError, match="Expected a number for lr"):
        poptorch.trainingModel(model(), optimizer=tensor)
    centered = torch.optim.RMSprop([{"params": [made.layer.weight], "centered": True}, {"params": [made.layer.bias]}])
    with pytest.raises(AssertionError, match="centered"):
        poptorch.trainingModel(model(), optimizer=centered)


def test_what_was_passed_to_the_constructor_is_variable() -> None:
    """python/optim.py:50-64."""
    attributes = poptorch.optim.AdamW(model().parameters(), lr=0.1, weight_decay=0.0).variable_attrs
    assert [attributes.isConstant(name) for name in ("lr", "weight_decay", "betas", "eps", "loss_scaling")] == [
        False, False, True, True, True]
    attributes.markAsConstant("lr")
    attributes.markAsVariable("eps")
    assert attributes.isConstant("lr") and not attributes.isConstant("eps")
    with pytest.raises(AssertionError):
        attributes.markAsVariable("nothing")


def change(optimizer: torch.optim.Optimizer, made: nn.Module, **values: Any) -> poptorch.PoplarExecutor:
    executor = poptorch.trainingModel(made, optimizer=optimizer)
    executor(X)
    for group in optimizer.param_groups:
        group.update(values)
    executor.setOptimizer(optimizer)
    return executor


def test_lr_only_in_groups_is_constant() -> None:
    """python/_optimizer_attributes.py: a group's lr that the constructor was not given cannot change after compilation."""
    made = model()
    with pytest.raises(poptorch.Error, match="lr of group 0 is constant"):
        change(poptorch.optim.Adam([{"params": made.parameters(), "lr": 0.1}]), made, lr=0.2)
    made = model()
    change(poptorch.optim.Adam([{"params": made.parameters(), "lr": 0.1}], lr=0.1), made, lr=0.2).destroy()


@pytest.mark.parametrize(("values", "passes"), [({"lr": 0.2}, True), ({"betas": (0.5, 0.5)}, False), ({"eps": 1e-3}, False),
                                                ({"weight_decay": 0.5}, True)])
def test_native_optimizers_constant_rules(values: Dict[str, Any], passes: bool) -> None:
    """python/_optimizer_attributes.py:167-195: lr variable, betas constant, the others constant exactly when at their default."""
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1, weight_decay=0.3)
    if passes:
        change(optimizer, made, **values).destroy()
    else:
        with pytest.raises(poptorch.Error, match="constant"):
            change(optimizer, made, **values)


def test_set_optimizer_takes_effect_and_host_edits_alone_do_not() -> None:
    """python/_poplar_executor.py:631-672."""
    made = model()
    optimizer = poptorch.optim.SGD(made.parameters(), lr=0.1)
    executor = poptorch.trainingModel(made, optimizer=optimizer)
    executor(X)
    weight = made.layer.weight.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    executor(X)
    assert not torch.equal(made.layer.weight, weight)
    executor(X)
    executor.setOptimizer(optimizer)
    assert executor._dirty_host_weights  # a schedule does not copy the weights back
    weight = made.layer.weight.detach().clone()
    executor(X)
    assert torch.equal(made.layer.weight, weight)
    executor.destroy()


def test_kind_groups_and_clipping_cannot_change() -> None:
    """_optimizer_attributes.py:111-125 (max_grad_norm), _impl.py:125-129 (the groups are traced); no lines for the kind."""
    made = model()
    executor = poptorch.trainingModel(made, optimizer=poptorch.optim.SGD(made.parameters(), lr=0.1))
    executor(X)
    split = [{"params": [made.layer.weight]}, {"params": [made.layer.bias]}]
    for other, match in ((poptorch.optim.Adam(made.parameters(), lr=0.1), "cannot change from SGD2 to ADAM"),
                         (poptorch.optim.SGD(made.parameters(), lr=0.1, max_grad_norm=1.0), "max_grad_norm"),
                         (poptorch.optim.SGD(split, lr=0.1), "groups")):
        with pytest.raises(poptorch.Error, match=match):
            executor.setOptimizer(other)


def test_schedulers_and_new_keys(caplog: pytest.LogCaptureFixture) -> None:
    """python/_optimizer_attributes.py:20-52: keys known at first are silent, later ones warn once, relaxed ones never."""
    for relaxed in (False, True):
        caplog.clear()
        made = model()
        optimizer = poptorch.optim.SGD(made.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer._step_count, optimizer._opt_called = 1, True  # what says that step() was called, old and new torch
        executor = poptorch.trainingModel(made, poptorch.Options().relaxOptimizerAttributesChecks(relaxed), optimizer)
        for _ in range(3):
            executor(X)
            scheduler.step()
            executor.setOptimizer(optimizer)
        assert executor._executable.optimizer.groups[0]["lr"][0] == pytest.approx(0.0125)
        assert not [record for record in caplog.records if "unexpected" in record.getMessage()]
        for _ in range(2):
            optimizer.param_groups[0]["colour"] = "red"
            executor.setOptimizer(optimizer)
        said = [record for record in caplog.records if "unexpected" in record.getMessage() and record.levelno >= logging.WARNING]
        assert len(said) == (0 if relaxed else 1)
        executor.destroy()


def test_float16_accumulators_choose_the_running_mean() -> None:
    """python/_optimizer_attributes.py:130-152."""
    made = model()
    executor = poptorch.trainingModel(made, optimizer=poptorch.optim.Adam(made.parameters(), lr=0.1, accum_type=torch.float16))
    strategy = executor.options.Training.meanAccumulationAndReplicationReductionStrategy
    assert strategy == poptorch.MeanReductionStrategy.Running


def test_state_dict_resumes_training_exactly() -> None:
    """python/optim.py:78-105, docs/user_guide/overview.rst:820-837."""
    made = Classifier()
    optimizer = poptorch.optim.AdamW(made.parameters(), lr=0.01)
    executor = poptorch.trainingModel(made, options(3), optimizer)
    for step in range(3):
        executor(*tokens(6, seed=step))
    weights, state = copy.deepcopy(dict(made.state_dict())), copy.deepcopy(optimizer.state_dict())
    assert {"ipu_state", "ipu_param", "state", "param_groups"} <= set(state)
    assert state["ipu_state"]["Accl1___head.weight"].norm() > 0
    executor(*tokens(6, seed=9))
    executor.destroy()
    again = Classifier()
    again.load_state_dict(weights)
    fresh = poptorch.optim.AdamW(again.parameters(), lr=0.01)
    fresh.load_state_dict(state)
    other = poptorch.trainingModel(again, options(3), fresh)
    other(*tokens(6, seed=9))
    assert all(torch.equal(u, v) for u, v in zip(made.parameters(), again.parameters()))
    other.destroy()


def test_state_dicts_of_torch_are_refused() -> None:
    """python/optim.py:78-105."""
    made = model()
    with pytest.raises(RuntimeError, match="Only IPU optimizer states"):
        poptorch.optim.Adam(made.parameters()).load_state_dict(torch.optim.Adam(made.parameters()).state_dict())
    with pytest.raises(RuntimeError, match="empty"):
        poptorch.optim.Adam(made.parameters()).load_state_dict({})


def test_optimizers_work_on_the_host_as_torchs() -> None:
    """python/optim.py:423 derives from torch's class: `step()` on CPU is torch's; loss scaling and clipping are ignored there."""
    ours, theirs = model(), model()
    one = poptorch.optim.AdamW(ours.parameters(), lr=0.1, loss_scaling=8.0, max_grad_norm=1e-6)
    other = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    for made, optimizer in ((ours, one), (theirs, other)):
        made(X).backward()
        optimizer.step()
    assert torch.equal(ours.layer.weight, theirs.layer.weight)
    assert copy.deepcopy(one).variable_attrs.isConstant("eps")
