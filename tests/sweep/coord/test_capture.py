"""What is captured is what training does: against the engine that trains, and against closed forms."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from ipu_lean.models import TrainStep
from ipu_lean.mup.figures import grouped
from ipu_lean.optim import Schedule, build_optimizer
from ipu_lean.sweep.coord.capture import measure, run, without_gradient
from ipu_lean.sweep.coord.rig import at_width, plain
from ipu_lean.train.engines import TorchEngine
from tests.sweep.coord.architectures import MLP, REFORMER, RESIDUAL, REVERSIBLE_TIED, Architecture

torch.set_num_threads(1)


def trained(architecture: Architecture, width: int, updates: int, rows: int):
    """The network after `updates` updates by the engine that `train` uses, all rows in one micro-batch."""
    config = at_width(plain(architecture.config()), width)
    config = config.model_copy(
        update={"batch": config.batch.model_copy(update={"micro": rows}),
                "optimizer": config.optimizer.model_copy(update={"weight_decay": 0.0})}
    )  # fmt: skip
    model = architecture.made(config)
    engine = TorchEngine(TrainStep(model), lambda live: build_optimizer(live, config), Schedule(), config)
    batch = tuple(tensor.numpy() for tensor in architecture.batch(0))
    for _ in range(updates):
        engine.train_step(batch)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("architecture", [RESIDUAL, REVERSIBLE_TIED, MLP], ids=lambda found: found.name)
def test_values_are_those_of_a_network_trained_by_the_engine(architecture: Architecture) -> None:
    inputs, _ = architecture.batch(0)
    rows = run(architecture.rig(), 32, 0, 3).coordinates
    assert sorted({row.step for row in rows}) == [0, 1, 2, 3]
    start, later = (trained(architecture, 32, updates, len(inputs)).eval() for updates in (0, 3))
    with torch.no_grad():
        for name, of in (("head", lambda model: model.readout(model.hidden(inputs))),
                         ("norm" if architecture.attends else "layer2", lambda model: model.hidden(inputs))):  # fmt: skip
            row = next(row for row in rows if row.module == name and row.step == 3)
            value, change = of(later).double(), of(later).double() - of(start).double()
            assert row.rms == pytest.approx(value.square().mean().sqrt().item(), rel=1e-5)
            assert row.mean_abs == pytest.approx(value.abs().mean().item(), rel=1e-5)
            assert row.change == pytest.approx(change.square().mean().sqrt().item(), rel=1e-4)
            assert row.change_std == pytest.approx(change.std().item(), rel=1e-4)


@pytest.mark.parametrize("architecture", [RESIDUAL, MLP], ids=lambda found: found.name)
def test_updates_are_those_of_the_engine(architecture: Architecture) -> None:
    tensors = {row.name: row for row in run(architecture.rig(), 64, 0, 3).tensors}
    rows = len(architecture.batch(0)[0])
    weights = [dict(trained(architecture, 64, updates, rows).named_parameters()) for updates in range(4)]
    assert set(tensors) == set(weights[0])
    for name, row in tensors.items():
        changes = [after[name].detach() - before[name].detach() for before, after in zip(weights, weights[1:])]
        moves = [change[change != 0].double().square().mean().sqrt().item() if change.any() else 0.0 for change in changes]
        first = next(index for index, move in enumerate(moves) if move)
        assert row.first_step == first + 1
        if "key.linear.bias" not in name:  # its gradient is all but rounding, which differs
            assert row.first == pytest.approx(moves[first], rel=2e-2)
            assert row.last == pytest.approx(moves[-1], rel=2e-2)


def test_what_a_network_watches_has_names_that_people_know() -> None:
    names = list(grouped(run(RESIDUAL.rig(), 32, 0, 4).coordinates, lambda row: row.module))
    layers = [f"layer{number}.{branch}" for number in (0, 1) for branch in ("attention", "feed_forward")]
    assert names == ["embed", *layers, "stack", "norm", "head"]
    shared = Architecture("shared", {**RESIDUAL.model, "num_hidden_groups": 1})
    names = list(grouped(run(shared.rig(), 32, 0, 4).coordinates, lambda row: row.module))
    assert "layer0.attention (visit 2)" in names


def test_the_same_rig_gives_the_same_figures_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two = measure(MLP.rig(), (32, 64), 4), measure(MLP.rig(), (32, 64), 4)
    assert one == two
    assert torch.equal(before, torch.get_rng_state())


def test_decay_is_rate_times_decay_at_every_width() -> None:
    figures = measure(MLP.rig(1e-2, weight_decay=0.2), (32, 128), 4)
    shares = [row.decay for row in figures.tensors if row.name.endswith("weight") and row.decay is not None]
    assert len(shares) == 6  # three layers at two widths; the readout is zero
    np.testing.assert_allclose(shares, 1e-2 * 0.2, rtol=1e-3)


def test_a_run_that_diverges_ends_and_says_when() -> None:
    figures = run(MLP.rig(1e30), 32, 0, 8)
    (size, seed, step), = figures.diverged
    assert (size, seed) == (32, 0) and 0 < step < 8
    assert max(row.step for row in figures.coordinates) == step


def test_parameters_whose_gradient_is_rounding_are_left_out() -> None:
    """A key's bias, unless positions turn the keys: softmax undoes what moves a whole row."""
    idle = {each.name: without_gradient(each.made(each.config())) for each in (REFORMER, RESIDUAL)}
    assert idle == {"reformer": {"layers.blocks.0.branches.0.attention.key.linear.bias"}, "residual": set()}
    figures = run(REFORMER.rig(), 32, 0, 4, signatures=False)
    still = {row.name for row in figures.tensors if not row.first}
    assert still == idle["reformer"]
