"""The recomputing engines give the gradients of plain autograd (`store`)."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.reversible.toys import (
    FeedForward,
    assert_same,
    collect,
    data,
    error,
    gradients,
    loss_of,
    residual,
    reversible,
)

pytestmark = pytest.mark.pod
RECOMPUTING = ["invert", "checkpoint"]
F64, F32 = torch.float64, torch.float32
TOLERANCE = {F64: 1e-10, F32: 1e-6}


@pytest.mark.parametrize("engine", RECOMPUTING)
@pytest.mark.parametrize("order", ["attn-ffn", "aaff"])
@pytest.mark.parametrize("output", ["y", "sum", "sum-minus-input", "mean"])
@pytest.mark.parametrize("dtype", [F64, F32])
def test_plain(engine, order, output, dtype):
    options = {"order": order, "output": output, "dtype": dtype, "layers": 4}
    assert_same(gradients(reversible("store", **options)), gradients(reversible(engine, **options)), TOLERANCE[dtype])


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_deep_in_single_precision(engine):
    options = {"dtype": F32, "layers": 16}
    assert_same(gradients(reversible("store", **options)), gradients(reversible(engine, **options)), 1e-6)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_output_x_leaves_the_last_branch_unused(engine):
    """As in plain autograd its parameters get no gradient at all, and the streams can still be rebuilt behind it."""
    reference, found = (gradients(reversible(e, output="x")) for e in ("store", engine))
    assert_same(reference, found, 1e-10)
    assert not any(name.startswith("blocks.2.branches.1") for name in found)
    assert any(name.startswith("blocks.2.branches.0") for name in found)


@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("order", ["attn-ffn", "aaff"])
def test_checkpoint_segments_of_any_length(every, order):
    options = {"order": order, "layers": 6, "dropout": 0.2}
    reference = gradients(reversible("store", **options))
    assert_same(reference, gradients(reversible("checkpoint", checkpoint_every=every, **options)), 1e-10)


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_residual_stack(every, dtype, dropout):
    reference = gradients(residual("store", dtype=dtype, dropout=dropout, layers=4))
    stack = residual("checkpoint", dtype=dtype, dropout=dropout, layers=4, checkpoint_every=every)
    assert_same(reference, gradients(stack), TOLERANCE[dtype])


@pytest.mark.parametrize("engine", RECOMPUTING)
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-10), (F32, 1e-6)])
def test_dropout_is_replayed(engine, dtype, tolerance):
    options = {"dropout": 0.3, "dtype": dtype}
    reference = gradients(reversible("store", **options))
    assert_same(reference, gradients(reversible(engine, **options)), tolerance)
    without = gradients(reversible("store", dtype=dtype))
    assert error(reference["x"], without["x"]) > 0.1, "dropout did something"


@pytest.mark.parametrize("engine", RECOMPUTING)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_bf16_autocast(engine, dropout):
    """The second run is in the precision of the first: without that the error is 4e-3 and more (bfloat16's own)."""
    options = {"dropout": dropout, "dtype": F32, "layers": 4}
    reference = gradients(reversible("store", **options), autocast=torch.bfloat16)
    assert_same(reference, gradients(reversible(engine, **options), autocast=torch.bfloat16), 2e-3)
    assert error(reference["x"], gradients(reversible("store", **options))["x"]) > 1e-3, "autocast did something"


@pytest.mark.parametrize(
    ("coupling", "start"), [("momentum", "zeros"), ("modified-momentum", "duplicate"), ("mean", "duplicate")]
)
def test_bf16_autocast_of_other_couplings(coupling, start):
    options = {"dtype": F32, "layers": 4, "coupling": coupling, "input": start, "output": "x" if start == "zeros" else "sum"}
    reference = gradients(reversible("store", **options), autocast=torch.bfloat16)
    assert_same(reference, gradients(reversible("invert", **options), autocast=torch.bfloat16), 4e-3)
    assert_same(reference, gradients(reversible("checkpoint", **options), autocast=torch.bfloat16), 1e-6)


@pytest.mark.parametrize("engine", RECOMPUTING)
@pytest.mark.parametrize(("visits", "tolerance"), [([0, 1, 2], 4e-3), ([0, 1, 0], 2e-3)], ids=["each once", "shared"])
def test_bf16_autocast_over_two_forwards(engine, visits, tolerance):
    """Plain autocast keeps each weight's cast and adds the two gradients in bfloat16; so do we where blocks are shared.

    Where they are not, no casts are kept and the sum is made in float32: it differs by up to half a unit of bfloat16, 2**-8.
    """

    def run(engine):
        stack = reversible(engine, visits=visits, dtype=F32, dropout=0.2)
        torch.manual_seed(7)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = stack(data(F32, 1)) + stack(data(F32, 2))
        loss_of(y.float()).backward()
        return collect(stack)

    assert_same(run("store"), run(engine), tolerance)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_bf16_autocast_is_as_near_to_the_truth_as_plain(dropout):
    """A rebuilt input is off by a float32 rounding, which now and then rounds to another bfloat16: fresh noise of the size that
    bfloat16 has anyway. So the distance to the float32 gradient is that of the plain stack."""
    options = {"dropout": dropout, "dtype": F32, "layers": 12}
    truth = gradients(reversible("store", **options))
    plain = gradients(reversible("store", **options), autocast=torch.bfloat16)
    rebuilt = gradients(reversible("invert", **options), autocast=torch.bfloat16)
    for name in truth:
        assert error(truth[name], rebuilt[name]) < 1.1 * error(truth[name], plain[name]) + 1e-4, name


@pytest.mark.parametrize("engine", RECOMPUTING)
@pytest.mark.parametrize("visits", [[0, 0, 0], [0, 0, 1, 1, 0]])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_shared_blocks(engine, visits, dropout):
    options = {"visits": visits, "dropout": dropout, "layers": max(visits) + 1}
    assert_same(gradients(reversible("store", **options)), gradients(reversible(engine, **options)), 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_the_same_branch_twice_in_a_row(engine):
    from ipu_lean.reversible import ReversibleBlock, ReversibleStack

    def made(engine):
        torch.manual_seed(0)
        branch = FeedForward(0.2)
        return ReversibleStack([ReversibleBlock([branch, branch])] * 2, engine=engine).double()

    assert_same(gradients(made("store")), gradients(made(engine)), 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_masks_and_keyword_arguments(engine):
    kwargs = {"mask": torch.randn(6, 6, dtype=F64), "gain": torch.rand(6, 1, dtype=F64)}
    reference = gradients(reversible("store"), **kwargs)
    assert_same(reference, gradients(reversible(engine), **kwargs), 1e-10)
    assert error(reference["x"], gradients(reversible("store"))["x"]) > 1e-2


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_keyword_tensors_that_need_a_gradient(engine):
    """Leaves and results of other layers alike: the graph is the first run's, so they are differentiated like anything else."""

    def with_gain(engine):
        stack = reversible(engine, dropout=0.2)
        raw = torch.rand(6, 1, generator=torch.Generator().manual_seed(4), dtype=F64).requires_grad_()
        mask = torch.randn(6, 6, generator=torch.Generator().manual_seed(5), dtype=F64).requires_grad_()
        found = gradients(stack, gain=raw.exp() * 2, mask=mask)
        return {**found, "raw": raw.grad, "mask": mask.grad}

    reference = with_gain("store")
    assert reference["raw"] is not None and reference["mask"] is not None
    assert_same(reference, with_gain(engine), 1e-10)


def freeze(stack, chosen):
    for name, parameter in stack.named_parameters():
        parameter.requires_grad_(not chosen(name))
    return stack


@pytest.mark.parametrize("engine", RECOMPUTING)
@pytest.mark.parametrize(
    "chosen",
    [
        lambda name: name.startswith("blocks.1.branches.0"),
        lambda name: name.startswith("blocks.0"),
        lambda name: name.startswith("blocks.2"),
        lambda name: "qkv" in name or "bias" in name,
        lambda name: not name.startswith("blocks.1.branches.1"),
    ],
    ids=["a branch", "the first block", "the last block", "some", "all but one branch"],
)
@pytest.mark.parametrize("needs_grad", [True, False], ids=["x needs grad", "x does not"])
def test_frozen_parameters(engine, chosen, needs_grad):
    def run(engine):
        stack = freeze(reversible(engine, dropout=0.2), chosen)
        return gradients(stack, data().requires_grad_(needs_grad))

    assert_same(run("store"), run(engine), 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_everything_frozen(engine):
    reference, found = (gradients(freeze(reversible(e), lambda name: True)) for e in ("store", engine))
    assert list(found) == ["x"]
    assert_same(reference, found, 1e-10)
    assert not freeze(reversible(engine), lambda name: True)(data()).requires_grad


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_an_input_without_gradient_still_trains_every_parameter(engine):
    reference, found = (gradients(reversible(e), data()) for e in ("store", engine))
    assert len(found) == len(list(reversible(engine).parameters()))
    assert_same(reference, found, 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_two_forwards_before_one_backward(engine):
    def run(engine):
        stack = reversible(engine, dropout=0.3)
        torch.manual_seed(7)
        first = stack(data(seed=1), mask=torch.randn(6, 6, dtype=F64))
        second = stack(data(seed=2))
        (loss_of(first, 3) * 2 + loss_of(second, 4)).backward()
        return collect(stack)

    assert_same(run("store"), run(engine), 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_the_stack_applied_to_its_own_output(engine):
    def run(engine):
        stack, x = reversible(engine, dropout=0.3), data().requires_grad_()
        torch.manual_seed(7)
        loss_of(stack(stack(x) + 1)).backward()
        return collect(stack, x=x)

    assert_same(run("store"), run(engine), 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_evaluation_between_forward_and_backward(engine):
    def run(engine):
        stack = reversible(engine, dropout=0.3)
        torch.manual_seed(7)
        y = stack(data())
        stack.eval()
        with torch.no_grad():
            stack(data(seed=9))
        if hasattr(torch, "inference_mode"):
            with torch.inference_mode():
                stack(data(seed=9))
        stack.train()
        loss_of(y).backward()
        return collect(stack)

    assert_same(run("store"), run(engine), 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_gradient_in_eval_mode(engine):
    reference, found = (gradients(reversible(e, dropout=0.3).eval()) for e in ("store", engine))
    assert_same(reference, found, 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_accumulation_over_micro_batches(engine):
    def run(engine):
        stack = reversible(engine, dropout=0.3)
        torch.manual_seed(7)
        for seed in range(3):
            loss_of(stack(data(seed=seed)), seed).backward()
        return collect(stack)

    assert_same(run("store"), run(engine), 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_a_stack_inside_a_branch(engine):
    """An engine within an engine: slow, but right."""

    class Nested(nn.Module):
        def __init__(self, engine):
            super().__init__()
            self.inner = reversible(engine, layers=2, dropout=0.2)

        def forward(self, x):
            return self.inner(x) * 0.5

    reference, found = (gradients(reversible(e, layers=2, make=lambda e=e: Nested(e))) for e in ("store", engine))
    assert_same(reference, found, 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_torch_checkpoint_inside_a_branch(engine):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(FeedForward):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    reference, found = (gradients(reversible(e, make=lambda: Checkpointed(0.2))) for e in ("store", engine))
    assert_same(reference, found, 1e-10)
