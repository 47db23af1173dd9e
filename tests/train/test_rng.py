"""Random state out and back."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from ipu_lean.train import rng

pytestmark = pytest.mark.pod
CPU = torch.device("cpu")


def draw() -> list:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.randn()),
        float(np.random.rand()),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    ]


def test_capture_and_restore_through_json() -> None:
    rng.seed_all(4, 0)
    draw()  # leaves a cached Gaussian in Python's and numpy's generators
    state = json.loads(json.dumps(rng.capture(CPU)))
    first = draw()
    assert draw() != first
    rng.restore(state, CPU)
    assert draw() == first


def test_ranks_differ_and_the_first_is_the_single_process() -> None:
    rng.seed_all(4, 0)
    torch.manual_seed(4)
    single = torch.rand(2)
    rng.seed_all(4, 0)
    assert torch.equal(torch.rand(2), single)
    rng.seed_all(4, 1)
    assert not torch.equal(torch.rand(2), single)
