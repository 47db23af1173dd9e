"""The engines against everything that one can do with an autograd graph."""
from __future__ import annotations

import threading

import pytest
import torch

from tests.reversible.toys import (
    assert_same,
    collect,
    data,
    gradients,
    loss_of,
    reversible,
)

pytestmark = pytest.mark.pod
RECOMPUTING = ["invert", "checkpoint"]


def calls(stack):
    return [branch.calls for block in stack.blocks for branch in block.branches]


@pytest.mark.parametrize("engine", RECOMPUTING)
@pytest.mark.parametrize("order", ["attn-ffn", "aaff"])
def test_each_branch_runs_exactly_twice_a_step(engine, order):
    stack = reversible(engine, layers=4, order=order, dropout=0.1)
    ended = []
    for block in stack.blocks:
        for branch in block.branches:
            branch.register_forward_hook(lambda module, args, out: ended.append(module))
    branches = 8
    for step in range(1, 4):
        gradients(stack)
        assert calls(stack) == [2 * step] * branches
    if engine == "invert":
        assert len(ended) == (2 * branches - 3) * 3, "three second runs a step end early: nobody needs their result"


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_without_gradient_each_branch_runs_once(engine):
    stack = reversible(engine)
    with torch.no_grad():
        y = stack(data())
    assert calls(stack) == [1] * 6 and not y.requires_grad


@pytest.mark.parametrize("engine", RECOMPUTING)
@pytest.mark.parametrize("output", ["sum-minus-input", "x", "y"])
def test_retain_graph(engine, output):
    stack, x = reversible(engine, dropout=0.3, output=output), data().requires_grad_()
    torch.manual_seed(7)
    loss = loss_of(stack(x))
    loss.backward(retain_graph=True)
    first = collect(stack, x=x)
    for _ in range(2):
        stack.zero_grad()
        x.grad = None
        loss.backward(retain_graph=True)
        assert_same(first, collect(stack, x=x), 1e-12)
    stack.zero_grad()
    x.grad = None
    loss.backward()
    assert_same(first, collect(stack, x=x), 1e-12)
    with pytest.raises(RuntimeError):
        loss.backward()


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_second_backward_adds_up(engine):
    stack = reversible(engine, dropout=0.3)
    loss = loss_of(stack(data()))
    loss.backward(retain_graph=True)
    once = collect(stack)
    loss.backward()
    assert_same({name: 2 * g for name, g in once.items()}, collect(stack), 1e-12)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_autograd_grad_has_no_side_effect(engine):
    reference = gradients(reversible("store", dropout=0.3))
    stack, x = reversible(engine, dropout=0.3), data().requires_grad_()
    torch.manual_seed(7)
    names, parameters = zip(*stack.named_parameters())
    found = torch.autograd.grad(loss_of(stack(x)), (*parameters, x))
    assert all(t.grad is None for t in (*parameters, x))
    assert_same(reference, dict(zip((*names, "x"), found)), 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
@pytest.mark.parametrize(
    "wanted", ["x", "blocks.0.branches.0.qkv.weight", "blocks.1.branches.1.norm.bias", "blocks.2.branches.1.down.bias"]
)
def test_gradient_of_one_tensor_only(engine, wanted):
    reference = gradients(reversible("store", dropout=0.3))
    stack, x = reversible(engine, dropout=0.3), data().requires_grad_()
    torch.manual_seed(7)
    loss, tensor = loss_of(stack(x)), dict(stack.named_parameters(), x=x)[wanted]
    (found,) = torch.autograd.grad(loss, tensor, retain_graph=True)
    assert_same({wanted: reference[wanted]}, {wanted: found}, 1e-10)
    (again,) = torch.autograd.grad(loss, tensor, retain_graph=True)
    assert torch.equal(found, again)
    loss.backward()
    assert_same(reference, collect(stack, x=x), 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_backward_with_inputs(engine):
    reference = gradients(reversible("store"))
    stack, x = reversible(engine), data().requires_grad_()
    loss_of(stack(x)).backward(inputs=[x])
    assert all(p.grad is None for p in stack.parameters())
    assert_same({"x": reference["x"]}, {"x": x.grad}, 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
@pytest.mark.parametrize("which", [(1, 0), (0, 1)])
def test_losses_on_one_stream_after_the_other(engine, which):
    """The two streams have graphs of different length, and each may be asked first."""

    def run(engine):
        stack, x = reversible(engine, dropout=0.3), data().requires_grad_()
        torch.manual_seed(7)
        streams = stack.run(x, x * 2)
        for k, place in enumerate(which):
            loss_of(streams[place], place).backward(retain_graph=k == 0)
        return collect(stack, x=x)

    assert_same(run("store"), run(engine), 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_part_of_the_output(engine):
    def run(engine):
        stack, x = reversible(engine, dropout=0.3), data().requires_grad_()
        torch.manual_seed(7)
        stack(x)[:, 2, :5].pow(3).sum().backward()
        return collect(stack, x=x)

    assert_same(run("store"), run(engine), 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_no_backward_is_started_inside_another(engine, monkeypatch):
    stack = reversible(engine, dropout=0.2)
    loss = loss_of(stack(data()))
    started = []
    real = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda *a, **k: (started.append(a), real(*a, **k)))
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: started.append(a))
    loss.backward()
    assert len(started) == 1


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_two_threads(engine):
    """Each thread's calls have their own frames."""
    reference = [gradients(reversible("store"), data(seed=seed).requires_grad_()) for seed in range(2)]
    stacks, found = [reversible(engine) for _ in range(2)], [None, None]

    def work(place):
        for _ in range(5):
            stacks[place].zero_grad()
            found[place] = gradients(stacks[place], data(seed=place).requires_grad_())

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place in range(2):
        assert_same(reference[place], found[place], 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_gradient_hooks_fire_once(engine):
    stack, fired = reversible(engine), []
    for name, parameter in stack.named_parameters():
        parameter.register_hook(lambda g, name=name: fired.append(name))
    gradients(stack)
    assert sorted(fired) == sorted(name for name, _ in stack.named_parameters())


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_module_backward_hooks_see_the_gradients_of_plain(engine):
    def run(engine):
        stack, seen = reversible(engine, dropout=0.2), {}
        for i, block in enumerate(stack.blocks):
            for k, branch in enumerate(block.branches):

                def hook(module, inward, outward, key=f"{i}.{k}"):
                    seen.update({f"in {key}": inward[0], f"out {key}": outward[0]})

                branch.register_full_backward_hook(hook)
        gradients(stack)
        return seen

    reference = run("store")
    assert len(reference) == 12
    assert_same(reference, run(engine), 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_anomaly_detection(engine):
    reference = gradients(reversible("store", dropout=0.2))
    with torch.autograd.set_detect_anomaly(True):
        assert_same(reference, gradients(reversible(engine, dropout=0.2)), 1e-10)
