"""Types, single ops and their arguments (docs/user_guide/supported_ops.rst)."""
from __future__ import annotations

import logging
from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_lean.ipu.emulator as poptorch

from .test_trace import Step, compile_step

pytestmark = pytest.mark.pod


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_types_that_the_ipu_lacks(dtype: torch.dtype) -> None:
    """dispatch_tracer/Tensor.cpp:47-68."""
    with pytest.raises(poptorch.Error, match="Unsupported tensor input type"):
        compile_step(lambda h: h.to(dtype).abs().float())
    with pytest.raises(poptorch.Error, match="Unsupported tensor input type"):
        poptorch.inferenceModel(nn.Identity())(torch.zeros(2, dtype=dtype))
    model = nn.Linear(2, 2).to(dtype)
    with pytest.raises(poptorch.Error, match="Unsupported tensor input type"):
        poptorch.inferenceModel(model)(torch.zeros(1, 2))


def test_64_bit_types_become_32_bit() -> None:
    """poptorch/source/Utils.cpp:141-151, _poplar_executor.py:863-874; integers wrap as 32-bit ones do."""
    executor = poptorch.inferenceModel(lambda_module(lambda x, n: (x.double() * 2, n * 2, n + 1)))
    x, n, m = executor(torch.randn(2, dtype=torch.float64), torch.tensor([2 ** 30, 3]))
    assert (x.dtype, n.dtype, m.dtype) == (torch.float32, torch.int32, torch.int32)
    assert n.tolist() == [-(2 ** 31), 6]
    executor.destroy()


def lambda_module(function: Callable[..., Any]) -> nn.Module:
    class Module(nn.Module):
        def forward(self, *args: torch.Tensor) -> Any:
            return function(*args)

    return Module()


def test_empty_tensors_are_refused() -> None:
    """poptorch/source/dispatch_tracer/dispatchers/JitDispatch.cpp:85."""
    with pytest.raises(poptorch.Error, match="Zero-sized"):
        poptorch.inferenceModel(nn.Identity())(torch.zeros(0, 2))


def test_gelu_is_the_tanh_form_whatever_is_asked_for() -> None:
    """poptorch/source/popart_canonicalization/ActivationOps.cpp:146-161."""
    x = torch.randn(8)
    executor = poptorch.inferenceModel(nn.GELU())
    assert torch.equal(executor(x), F.gelu(x, approximate="tanh")) and not torch.equal(executor(x), F.gelu(x))
    executor.destroy()


def test_index_put_ignores_accumulate(caplog: pytest.LogCaptureFixture) -> None:
    """poptorch/source/popart_canonicalization/IndexOps.cpp:228-306."""
    def put(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(3).index_put((torch.tensor([1, 1, 2]),), x, accumulate=True)

    executor = poptorch.inferenceModel(lambda_module(put))
    with caplog.at_level(logging.WARNING, "poptorch"):
        found = executor(torch.tensor([1.0, 2.0, 3.0]))
    assert found[1] in (1.0, 2.0) and found[2] == 3.0
    assert any("accumulate" in record.getMessage() for record in caplog.records)
    executor.destroy()


@pytest.mark.parametrize(("middle", "match"), [
    (lambda h: torch.argsort(h.detach(), stable=True) * h, "argsort"), (lambda h: h.topk(2, sorted=False)[0], "topk"),
    (lambda h: torch.div(h, 0.3, rounding_mode="floor"), "rounding_mode"),
    (lambda h: torch.bincount(h.detach().argmax(-1)).sum() * h, "minlength"),
    (lambda h: F.one_hot(h.detach().argmax(-1)) * h, "num_classes"),
    (lambda h: F.embedding(h.detach().argmax(-1), h, sparse=True), "sparse")])
def test_refused_arguments(middle: Callable[[torch.Tensor], torch.Tensor], match: str) -> None:
    """ReduceOps.cpp:182-206, supported_ops.rst:197,366, RegisterMetaOps.cpp.inc:40-47, EmbeddingOps.cpp:24-27."""
    with pytest.raises(poptorch.Error, match=match):
        compile_step(middle)


def test_integer_indices_of_32_bits_work_everywhere() -> None:
    def many(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, i) + x[i] + F.embedding(i, x) + x.gather(0, i.long()[:, None].expand(-1, 4))

    x, i = torch.randn(3, 4), torch.tensor([2, 0, 1], dtype=torch.int32)
    executor = poptorch.inferenceModel(lambda_module(many))
    assert torch.allclose(executor(x, i), 4 * x[i.long()])
    executor.destroy()


def test_source_location_excludes() -> None:
    """python/options.py:1240-1261: frames of excluded files are skipped in messages."""
    options = poptorch.Options().appendToLocationExcludes("test_trace")
    with pytest.raises(poptorch.Error) as error:
        poptorch.trainingModel(Step(lambda h: torch.lerp(h, h * 2, 0.5)), options).compile(torch.randn(3, 4))
    assert "test_trace.py" not in str(error.value)
