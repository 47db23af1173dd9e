"""Blocks to IPUs: stages counted as PopTorch counts them, weights on one IPU, and nothing left on the model afterwards."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import pytest
import torch

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.config.layout import layout, resolve_layers, stages
from ipu_lean.errors import ConfigError
from ipu_lean.ipu import PopTrainStep, make_options, place
from ipu_lean.ipu.emulator.examine import examine
from ipu_lean.models import build_model
from tests.ipu.helpers import VOCAB, batch_for, ipu_config

pytestmark = pytest.mark.pod

LAYOUTS = [
    # layers, tied, section, path, F
    ([4], True, {}, [0], 1),
    ([2, 2], True, {}, [0, 1, 0], 3),
    ([2, 2], False, {}, [0, 1], 2),
    ([0, 4], True, {}, [0, 1, 0], 3),
    ([1, 1, 1, 1], True, {}, [0, 1, 2, 3, 0], 5),
    ([1, 1, 1, 1], False, {"head_ipu": 0}, [0, 1, 2, 3, 0], 5),
    ([2, 2], False, {"embedding_ipu": 1}, [0, 1, 0, 1], 4),
    ([2, 2], True, {"embedding_ipu": 1}, [0, 1, 0, 1], 4),
]


def config_of(layers: List[int], tied: bool, section: Any) -> Any:
    return ipu_config(model={"tied": tied}, batch={"accumulation": 9}, ipu={"layers_per_ipu": layers, **section})


@pytest.mark.parametrize("layers, tied, section, path, forward", LAYOUTS)
def test_stages_are_those_of_the_traced_graph(layers: Any, tied: bool, section: Any, path: Any, forward: int) -> None:
    config = config_of(layers, tied, section)
    assert layout(config).path == path and stages(config) == forward
    model = build_model(config, VOCAB)
    placement = place(model, config, poptorch)
    assert (placement.stages, placement.path, placement.ipus) == (forward, path, max(path) + 1)
    inputs = tuple(torch.from_numpy(array) for array in batch_for(config, config.batch.device_iterations))
    report = examine(PopTrainStep(model, poptorch), inputs, options=make_options(config, poptorch).train)
    assert [str(item) for item in report.violations] == []
    assert (report.forward_stages, report.ipus) == (forward, placement.ipus)


def test_the_table_names_every_block_and_counts_every_parameter_once() -> None:
    config = ipu_config()
    model = build_model(config, VOCAB)
    placement = place(model, config, poptorch)
    assert sum(row.parameters for row in placement.rows) == sum(parameter.numel() for parameter in model.parameters())
    assert [(row.name, row.ipu, row.stage) for row in placement.rows] == [
        ("embed", 0, 0), ("layer0", 0, 0), ("layer1", 0, 0), ("layer2", 1, 1), ("layer3", 1, 1), ("norm", 1, 1), ("head", 0, 2),
    ]
    lines = placement.table.splitlines()
    assert len(lines) == 4 and lines[1].split()[-3:] == ["embed,", "layer0,", "layer1"]


def test_long_runs_of_layers_are_written_short() -> None:
    config = ipu_config(model={"depth": 8}, ipu={"layers_per_ipu": [4, 4]})
    assert "embed, layer0-layer3" in place(build_model(config, VOCAB), config, poptorch).table


def test_nothing_is_left_on_the_model() -> None:
    config = ipu_config()
    model = build_model(config, VOCAB)
    before = {name: id(module) for name, module in model.named_modules()}
    tokens = torch.from_numpy(batch_for(config, 1)[0])
    wanted = model(tokens)
    placement = place(model, config, poptorch)
    assert torch.equal(model(tokens), wanted)  # hooks do nothing on the host
    assert any(module._forward_pre_hooks for module in model.modules())
    placement.remove()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert {name: id(module) for name, module in model.named_modules()} == before


def test_placing_changes_no_name_of_a_parameter() -> None:
    config = ipu_config(model={"positions": "rotary"})
    model = build_model(config, VOCAB)
    names = list(model.state_dict())
    place(model, config, poptorch)
    assert list(model.state_dict()) == names


def test_shared_tables_of_positions_are_given_to_each_ipu() -> None:
    config = ipu_config()
    model = build_model(config, VOCAB)
    place(model, config, poptorch)
    tables = [block.module.branches[0].attention.positions for block in model.blocks() if block.kind == "layer"]
    assert tables[0] is tables[1] and tables[2] is tables[3] and tables[0] is not tables[2]
    assert torch.equal(tables[0].cos, tables[2].cos)


@pytest.mark.parametrize("kind", ["reversible", "residual"])
@pytest.mark.parametrize("every", [True, False])
def test_recomputation_is_marked_at_the_border_of_each_layer(kind: str, every: bool) -> None:
    config = ipu_config(model={"stack": {"kind": kind}}, ipu={"recompute_checkpoint_every_layer": every})
    model = build_model(config, VOCAB)
    place(model, config, poptorch)
    inputs = tuple(torch.from_numpy(array) for array in batch_for(config, 2))
    report = examine(PopTrainStep(model, poptorch), inputs, options=make_options(config, poptorch).train)
    marks = sum("recomputation_checkpoint" in row["op"] for row in report.ops)
    assert marks == (4 * (2 if kind == "reversible" else 1) if every else 0)


def test_shared_layers_are_marked_once_and_stay_on_one_ipu() -> None:
    config = ipu_config(model={"num_hidden_groups": 2, "tied": False}, ipu={"layers_per_ipu": [2, 2]})
    placement = place(build_model(config, VOCAB), config, poptorch)
    assert [row.ipu for row in placement.rows] == [0, 0, 0, 1, 1, 1, 1]
    assert [row.parameters for row in placement.rows if row.kind == "layer"][1] == 0


@pytest.mark.parametrize(
    "given, depth, wanted",
    [
        (None, 5, [5]),
        ([2, 3], 5, [2, 3]),
        ([0, -1], 5, [0, 5]),
        ([-1, -1], 5, [2, 3]),
        ([0, -1, -1, -1], 8, [0, 2, 3, 3]),
        ([3, -1, 1], 4, [3, 0, 1]),
    ],
)
def test_wildcards(given: Any, depth: int, wanted: List[int]) -> None:
    assert resolve_layers(given, depth) == wanted
    assert int(np.sum(wanted)) == depth


@pytest.mark.parametrize("given", [[-1, -2], [3, 3], [6, -1], [1, 1]])
def test_layers_that_do_not_add_up(given: List[int]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_layers(given, 5)
    assert caught.value.key == "ipu.layers_per_ipu"


def test_a_model_that_ties_more_than_the_configuration_says_is_refused() -> None:
    config = ipu_config(model={"tied": False})
    tied = build_model(ipu_config(model={"tied": True}), VOCAB)
    with pytest.raises(ConfigError, match="embed on IPU 0 shares weights with head on IPU 1"):
        place(tied, config, poptorch)
