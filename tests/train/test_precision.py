"""The loss scale against torch's, and the refusals."""

from __future__ import annotations

import pytest
import torch

from ipu_lean import _compat
from ipu_lean.config import LossScaleConfig, make_config
from ipu_lean.errors import ConfigError, EnvironmentProblem, RunError
from ipu_lean.train import precision
from ipu_lean.train.precision import LossScale

pytestmark = pytest.mark.pod


@pytest.mark.skipif(_compat.TORCH < (2, 3), reason="torch has no CPU GradScaler to compare with")
def test_scale_moves_as_torch_moves_it() -> None:
    pattern = [0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]
    ours = LossScale(LossScaleConfig(init=65536.0, window=3, minimum=1.0))
    theirs = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step, overflow in enumerate(pattern):
        ours.update(bool(overflow), step)
        weight.grad = None
        theirs.scale(weight.sum()).backward()
        if overflow:
            weight.grad.fill_(float("inf"))
        theirs.step(optimizer)
        theirs.update()
        assert ours.scale == theirs.get_scale(), step


def test_minimum_and_state() -> None:
    scale = LossScale(LossScaleConfig(init=4.0, window=10, minimum=2.0))
    scale.update(False, 1)
    copy = LossScale(LossScaleConfig(init=4.0, window=10, minimum=2.0))
    copy.load_state_dict(scale.state_dict())
    assert (copy.scale, copy.clean) == (4.0, 1)
    scale.update(True, 2)
    assert scale.scale == 2.0
    with pytest.raises(RunError, match="at step 3 even with a loss scale of 2"):
        scale.update(True, 3)


def test_autocast_contexts() -> None:
    for name, dtype in precision.AUTOCAST.items():
        if name == "fp16-mixed" and _compat.TORCH < (2, 3):
            continue
        with precision.autocast(name, "cpu"):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (dtype or torch.float32)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_config(mup={"base_width": 64})
    with pytest.raises(ConfigError, match="IPU's arithmetic"):
        precision.check_precision(plain.model_copy(update={"precision": "fp16-ipu"}))
    precision.check_precision(plain.model_copy(update={"precision": "bf16-pure"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentProblem, match="device: cpu"):
        precision.check_precision(plain.model_copy(update={"device": "gpu"}))
    monkeypatch.setattr(_compat, "TORCH", (2, 2))
    with pytest.raises(EnvironmentProblem, match="torch 2.3"):
        precision.check_precision(plain.model_copy(update={"precision": "fp16-mixed"}))
    monkeypatch.setattr(_compat, "TORCH", (2, 3))
    precision.check_precision(plain.model_copy(update={"precision": "fp16-mixed"}))
