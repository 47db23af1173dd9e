"""The `sweep` section: short forms, refusals, and that it changes nothing else."""

from __future__ import annotations

import pytest

from ipu_lean.config import config_hash, dump_config, load_config, make_config
from ipu_lean.config.schema import json_schema
from ipu_lean.config.show import rows
from ipu_lean.errors import ConfigError

pytestmark = pytest.mark.pod


def config(**sweep):
    return make_config(mup={"base_width": 32}, sweep=sweep)


def test_text_and_counts_become_lists():
    sweep = config(widths="32..128", depths="2,8", lrs="2^-8..2^-6", seeds=3).sweep
    assert (sweep.widths, sweep.depths, sweep.seeds) == ([32, 64, 128], [2, 8], [0, 1, 2])
    assert sweep.lrs == [2.0**-8, 2.0**-7, 2.0**-6]
    alone = config(widths=64, lrs=1e-3, seeds="0,1,5").sweep
    assert (alone.widths, alone.lrs, alone.seeds) == ([64], [1e-3], [0, 1, 5])


def test_it_survives_yaml_and_overrides():
    grid = {"optimizer.weight_decay": [0, 0.1]}
    one = config(widths=[64, 32], lrs="1e-3..1e-1/5", grid=grid, parametrizations=["mup", "standard"])
    assert load_config(dump_config(one)) == one and one.sweep.widths == [32, 64]
    assert load_config(dump_config(one), ["sweep.seeds=2"]).sweep.seeds == [0, 1]


@pytest.mark.parametrize(
    "sweep, words",
    [
        ({"widths": "32..", "lrs": [1e-3]}, "no end"),
        ({"widths": [32, 32]}, "stands twice"),
        ({"widths": [32.5]}, "whole number"),
        ({"widths": "32.5"}, "whole number"),
        ({"seeds": 0}, "at least 1"),
        ({"grid": {"optimizer.eps": [1, 1]}}, "all different"),
        ({"grid": {"optimizer.eps": []}}, "at least one"),
        ({"parametrizations": ["sp"]}, "mup"),
        ({"width": [32]}, "sweep.widths"),
        ({"final_share": 0}, "greater than 0"),
    ],
)
def test_mistakes_name_the_key(sweep, words):
    with pytest.raises(ConfigError) as caught:
        config(**sweep)
    assert words in str(caught.value) and "sweep." in str(caught.value)


def test_a_sweep_section_changes_nothing_that_a_run_computes():
    assert config_hash(config(widths=[32])) == config_hash(make_config(mup={"base_width": 32}))


def test_the_schema_lets_editors_accept_both_forms():
    properties = json_schema()["$defs"]["SweepConfig"]["properties"]
    assert properties["widths"]["type"] == ["array", "string", "number"]
    assert properties["seeds"]["type"] == ["array", "integer", "string"]


def test_config_show_has_it_as_one_value():
    from ipu_lean.config import load

    shown = {row["key"]: row for row in rows(load("mup: {base_width: 32}\nsweep: {widths: '32..64'}\n"))}
    assert shown["sweep"]["value"]["widths"] == [32, 64] and shown["sweep"]["changed"]
