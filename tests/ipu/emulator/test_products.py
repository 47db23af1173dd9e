"""Matrix products with float16 partial sums: closed forms, gradients, and what is refused."""
from __future__ import annotations

from typing import Any, Tuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.ipu.emulator import half
from ipu_lean.ipu.emulator.products import accumulate

from .common import Calls

pytestmark = pytest.mark.pod
HALF = torch.float16


def made(partials: torch.dtype, stochastic: bool = False) -> poptorch.Options:
    options = poptorch.Options().randomSeed(3)
    options.Precision.setPartialsType(partials)
    options.Precision.enableStochasticRounding(stochastic)
    return options


def run(partials: torch.dtype, function: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """What an inference model gives for `function(module, *inputs)`."""
    executor = poptorch.inferenceModel(Calls(function, width=2).half(), made(partials))
    found = executor(*inputs)
    executor.destroy()
    return found


def by_hand(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """16 products at a time in double precision, the sum so far rounded to float16 by numpy."""
    total = np.zeros((a.shape[0], b.shape[1]), dtype=np.float16)
    for start in range(0, a.shape[1], 16):
        part = a[:, start : start + 16].astype(np.float64) @ b[start : start + 16].astype(np.float64)
        total = (total.astype(np.float64) + part).astype(np.float16)
    return total


def test_the_sum_so_far_is_rounded_after_16_products() -> None:
    """Small integers: products and their sums are exact in float32, so that only the rounding to float16 counts."""
    draw = np.random.default_rng(0)
    a, b = (draw.integers(-40, 41, shape).astype(np.float16) for shape in ((7, 100), (100, 5)))
    found = run(HALF, lambda m, x, y: torch.mm(x, y), torch.from_numpy(a), torch.from_numpy(b))
    assert found.dtype == HALF and np.array_equal(found.numpy(), by_hand(a, b))
    exact = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16)
    wide = run(torch.float32, lambda m, x, y: torch.mm(x, y), torch.from_numpy(a), torch.from_numpy(b))
    assert np.array_equal(wide.numpy(), exact) and not np.array_equal(found.numpy(), exact)


def test_small_products_are_lost_in_a_large_sum() -> None:
    """2048 + 64 x 16/32: to nearest, half of a unit at a time never arrives; float32 partials add up to 2080."""
    row = torch.full((1, 16 * 65), 1 / 32)
    row[0, :16] = 128.0
    ones = torch.ones(16 * 65, 1)
    product = lambda m, x, y: torch.mm(x, y)  # noqa: E731
    assert run(HALF, product, row.half(), ones.half()).item() == 2048
    assert run(torch.float32, product, row.half(), ones.half()).item() == 2080


def test_stochastic_rounding_of_partial_sums_keeps_the_mean() -> None:
    row = torch.full((1, 16 * 65), 1 / 32)
    row[0, :16] = 128.0
    torch.manual_seed(0)
    with half.rounding(True):
        found = accumulate(row.half().expand(20000, -1), torch.ones(16 * 65, 1).half()).double()
    assert found.std().item() > 1 and abs(found.mean().item() - 2080) < 5 * found.std().item() / 20000 ** 0.5


def test_partial_sums_overflow_although_the_sum_would_fit() -> None:
    row = torch.tensor([[30000.0] * 16 + [-30000.0] * 16])
    column = torch.tensor([[0.25]]).expand(32, 1)
    assert torch.isinf(run(HALF, lambda m, x, y: torch.mm(x, y), row.half(), column.half())).all()
    assert run(torch.float32, lambda m, x, y: torch.mm(x, y), row.half(), column.half()).item() == 0


def cases() -> Tuple[Tuple[str, Any], ...]:
    def addmm(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.addmm(x[:, :1], x, y, beta=2, alpha=0.5)

    def batched(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.bmm(torch.stack([x, -x]), torch.stack([y, y * 2]))

    plain = ("linear", lambda m, x, y: F.linear(x, y.t(), y[0])), ("matmul", lambda m, x, y: x @ y)
    return (("addmm", addmm), ("bmm", batched), *plain)


@pytest.mark.parametrize("name, function", cases(), ids=[name for name, _ in cases()])
def test_every_kind_of_product(name: str, function: Any) -> None:
    draw = np.random.default_rng(1)
    a, b = (draw.integers(-40, 41, shape).astype(np.float16) for shape in ((6, 64), (64, 4)))
    found = run(HALF, function, torch.from_numpy(a), torch.from_numpy(b)).numpy()
    product = by_hand(a, b)
    if name == "addmm":
        product = (product.astype(np.float64) / 2 + 2 * a[:, :1]).astype(np.float16)
    elif name == "linear":
        product = (product.astype(np.float64) + b[0]).astype(np.float16)
    elif name == "bmm":
        product = np.stack([product, by_hand(-a, b * 2)])
    assert np.array_equal(found, product)


def test_gradients_have_float16_partial_sums_too() -> None:
    """The gradient of the weight adds up over 1040 rows: 2048 from the first 16 of them, and a half from each further 16."""
    class Push(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1, 1).half())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return poptorch.identity_loss((x @ self.weight).float(), "sum")

    rows = torch.full((16 * 65, 1), 1 / 32)
    rows[:16] = 128.0
    for partials, wanted in ((HALF, -2.0), (torch.float32, -2.03125)):
        model = Push()
        executor = poptorch.trainingModel(model, made(partials), poptorch.optim.SGD(model.parameters(), lr=2.0 ** -10))
        executor(rows.half())
        assert model.weight.item() == wanted
        executor.destroy()


def test_float32_products_keep_float32_partials() -> None:
    found = run(HALF, lambda m, x, y: torch.mm(x, y), torch.ones(1, 4096), torch.full((4096, 1), 1 + 2.0 ** -12))
    assert found.dtype == torch.float32 and found.item() == 4097


def test_products_without_an_emulation_are_refused_by_name() -> None:
    model = nn.Conv1d(4, 4, 1).half()
    executor = poptorch.inferenceModel(model, made(HALF))
    with pytest.raises(poptorch.Error, match="partial sums of aten::convolution are not emulated"):
        executor(torch.ones(1, 4, 3).half())
    executor.destroy()
    executor = poptorch.inferenceModel(model, made(torch.float32))
    assert executor(torch.ones(1, 4, 3).half()).dtype == HALF
    executor.destroy()


@pytest.mark.parametrize("stochastic", [False, True])
def test_gradients_of_several_readers_are_added_in_float16(stochastic: bool) -> None:
    """2048 + 3 x 0.5 + 1: to nearest, 0.5 is lost each time, and 1 is a tie that goes to even; by chance, 2050.5 on average."""
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8000).half())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = self.weight
            parts = [w * factor for factor in (2048.0, 0.5, 0.5, 0.5, 1.0)]
            return poptorch.identity_loss(sum(part.float().sum() for part in parts) + x.sum() * 0, "sum")

    model = Read()
    executor = poptorch.trainingModel(model, made(torch.float32, stochastic), poptorch.optim.SGD(model.parameters(), lr=1.0))
    executor(torch.zeros(1, 1))
    found = -model.weight.double()
    executor.destroy()
    if stochastic:
        assert set(found.tolist()) <= {2048, 2050, 2052, 2054, 2056} and abs(found.mean().item() - 2050.5) < 0.1
    else:
        assert (found == 2048).all()
