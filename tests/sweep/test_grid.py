"""Which trials there are, and that they differ in nothing but the axes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ipu_lean.config import SweepConfig, make_config
from ipu_lean.config.fields import takes_list
from ipu_lean.errors import ConfigError
from ipu_lean.sweep.grid import WIDTH, check_alike, expand, lr_text

pytestmark = pytest.mark.pod


def base(**sections):
    return make_config(**{"model": {"width": 32, "heads": 2, "seq": 8}, "mup": {"base_width": 32}, **sections})


def test_the_grid_is_the_product_of_its_axes():
    sweep = SweepConfig(
        widths=[32, 64],
        depths=[2, 4],
        lrs=[0.01, 0.02],
        seeds=2,
        grid={"optimizer.weight_decay": [0, 0.1]},
        parametrizations=["mup", "standard"],
    )
    trials = expand(base(), sweep)
    axes = (["mup", "standard"], [2, 4], [32, 64], [0, 0.1], [0.01, 0.02], [0, 1])
    names = ("parametrization", "depth", "width", "optimizer.weight_decay", "lr", "seed")
    assert [tuple(trial.axes[name] for name in names) for trial in trials] == list(itertools.product(*axes))
    assert len({trial.id for trial in trials}) == len(trials) == 64
    for trial in trials:
        config = trial.config
        found = (config.mup.parametrization, config.model.depth, config.model.width, config.optimizer.weight_decay)
        assert (*found, config.optimizer.lr, config.seed) == tuple(trial.axes[name] for name in names)
        assert config.sweep is None and config.mup.base_width == 32


def test_without_flags_an_axis_has_the_configurations_own_value():
    (trial,) = expand(base(seed=7, optimizer={"lr": 0.5}), SweepConfig())
    assert trial.axes == {"parametrization": "mup", "depth": 6, "width": 32, "lr": 0.5, "seed": 7}


def test_a_number_of_features_scales_with_the_width():
    model = {"width": 32, "heads": 2, "seq": 8, "ffn_width": 48}
    config = base(model=model, mup={"base": model})
    assert [trial.config.model.ffn_width for trial in expand(config, SweepConfig(widths=[32, 64]))] == [48, 96]
    config = base(model={"width": 32, "heads": 2, "seq": 8, "positions": "axial", "axial": {"dims": [8, 24]}})
    assert [trial.config.model.axial.dims for trial in expand(config, SweepConfig(widths=[32, 64]))] == [[8, 24], [16, 48]]


def test_an_id_depends_on_what_is_computed_only():
    one, again = (expand(base(name=name, logging={"csv": False}), SweepConfig(executor=who))[0] for name, who in
                  (("a", "local"), ("b", "ray")))
    assert one.id == again.id
    assert expand(base(), SweepConfig(evaluate=True))[0].id != expand(base(), SweepConfig())[0].id
    assert expand(base(seed=1), SweepConfig())[0].id != expand(base(), SweepConfig())[0].id


@pytest.mark.parametrize(
    "key, words",
    [
        ("batch.micro", "one batch size"),
        ("model.seq", "context length"),
        ("train.steps", "number of updates"),
        ("schedule.steps", "horizon"),
        ("data.corpus", "one text"),
        ("mup.base_width", "one base"),
        ("mup.base", "one base"),
        ("model.width", "--widths"),
        ("optimizer.lr", "--lrs"),
        ("seed", "--seeds"),
        ("model", "section"),
        ("model.stack", "section"),
        ("optimizer.weightdecay", "did you mean `optimizer.weight_decay`"),
        ("sweep.widths", "no sweeps inside"),
    ],
)
def test_what_can_be_no_axis_is_refused_by_name(key, words):
    with pytest.raises(ConfigError) as caught:
        expand(base(), SweepConfig(grid={key: [1, 2]}))
    assert words in str(caught.value) and key in str(caught.value)


def test_mup_without_a_base_is_refused():
    config = make_config(mup={"parametrization": "standard"})
    with pytest.raises(ConfigError, match="muP needs a base"):
        expand(config, SweepConfig(widths=[64, 128], parametrizations=["mup", "standard"]))


def test_a_trial_that_is_no_configuration_says_which_one_it_is():
    with pytest.raises(ConfigError, match="in the trials with .*width 33"):
        expand(base(), SweepConfig(widths=[32, 33]))


@pytest.mark.parametrize(
    "change, key",
    [
        ({"batch": {"micro": 3}}, "batch.micro"),
        ({"mup": {"base_width": 16}}, "mup.base_width"),
        ({"optimizer": {"lr": 9.0}}, "optimizer.lr"),
    ],
)
def test_trials_that_differ_in_more_than_the_axes_are_refused(change, key):
    first, second = expand(base(), SweepConfig(widths=[32, 64]))
    check_alike([first, second], [WIDTH])
    other = replace(second, config=expand(base(**change), SweepConfig(widths=[64]))[0].config)
    with pytest.raises(ConfigError, match=f"`{key}"):
        check_alike([first, other], [WIDTH])


def test_lists_and_scalars_are_told_apart():
    assert takes_list("optimizer.betas") and takes_list("ipu.layers_per_ipu")
    assert not takes_list("optimizer.weight_decay") and not takes_list("model.heads")
    trials = expand(base(), SweepConfig(grid={"optimizer.betas": [[0.9, 0.95], [0.9, 0.99]]}))
    assert [trial.config.optimizer.betas for trial in trials] == [(0.9, 0.95), (0.9, 0.99)]


def test_learning_rates_read_as_powers_of_two_where_they_are():
    assert [lr_text(lr) for lr in (2.0**-7, 1.0, 3e-3, 2.0**-7 * 1.5)] == ["2^-7", "2^0", "0.003", "0.0117"]
