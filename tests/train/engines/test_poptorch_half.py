"""fp16 on the emulated IPU from a configuration: partial sums, and an automatic loss scale that a resumed run goes on with."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from ipu_lean.config import Config
from ipu_lean.train.engines import make_engine
from ipu_lean.train.world import World
from tests.ipu.helpers import ipu_config, lively
from tests.train.engines.pairs import calls

pytestmark = pytest.mark.pod


def half_config(**ipu: Any) -> Config:
    section = {"emulate_precision": True, **ipu}
    return ipu_config(precision="fp16-ipu", ipu=section, train={"steps": 8, "eval_every": 0, "save_every": 8})


def start(config: Config) -> Any:
    return make_engine(lively(config), config, World())


def test_half_partials_change_rounding_only() -> None:
    losses = {}
    for partials in ("float", "half"):
        config = half_config(partials=partials, stochastic_rounding=False)
        device = start(config)
        losses[partials] = [loss for batch in calls(config, updates=4)[0] for loss in device.train_step(batch).losses]
        device.close()
    np.testing.assert_allclose(losses["half"], losses["float"], rtol=5e-3)
    assert losses["half"] != losses["float"]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_the_automatic_scale_goes_on_where_it_was(kind: str) -> None:
    optimizer = {"kind": "adamw"} if kind == "adamw" else {"kind": "sgd", "lr": 0.05}
    config = half_config(loss_scaling="auto").model_copy(update={"optimizer": ipu_config(optimizer=optimizer).optimizer})
    mine, _ = calls(config, updates=8)
    whole = start(config)
    for batch in mine[:2]:
        whole.train_step(batch)
    # 1024 at the base width, twice that at twice the width; it has moved since.
    first = whole.executor._executable.loss_scaling()
    assert first != 2048.0 and first <= 2.0**15
    weights = {name: value.clone() for name, value in whole.sync_to_host().items()}
    state, moments = json.loads(json.dumps(whole.state_dict())), whole.optimizer_state()
    assert state["ipu"]["scale"] == first / 2048.0
    for batch in mine[2:]:
        whole.train_step(batch)
    last, final = whole.executor._executable.loss_scaling(), whole.sync_to_host()
    whole.close()
    resumed = start(config)
    resumed.model.load_state_dict(weights)
    resumed.load_state_dict(state)
    resumed.load_optimizer_state(moments)
    assert resumed.state_dict() == state
    for batch in mine[2:]:
        resumed.train_step(batch)
    assert resumed.executor._executable.loss_scaling() == last
    for (name, one), other in zip(final.items(), resumed.sync_to_host().values()):
        assert torch.equal(one, other), name
    resumed.close()
