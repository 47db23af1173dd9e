"""What one trace sees, accepts and refuses."""
from __future__ import annotations

from typing import Any, Callable, List

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_lean.ipu.emulator as poptorch

pytestmark = pytest.mark.pod


class Step(nn.Module):
    """A linear layer, then any function, then a marked loss."""

    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor] = lambda h: h, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("table", torch.arange(float(width)))
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.middle(self.layer(x)), "mean")


def compile_step(middle: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> poptorch.PoplarExecutor:
    executor = poptorch.trainingModel(Step(middle), poptorch.Options())
    executor.compile(torch.randn(3, 4))
    executor.detachFromDevice()
    return executor


def test_forward_runs_once_however_many_steps() -> None:
    """docs/user_guide/intro.rst:35-40: one static graph."""
    calls: List[int] = []

    def middle(h: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return h

    executor = poptorch.trainingModel(Step(middle))
    for _ in range(5):
        executor(torch.randn(3, 4))
    executor.destroy()
    assert calls == [1]


def test_is_running_on_ipu_only_while_tracing() -> None:
    """python/_impl.py:76."""
    seen: List[bool] = []
    executor = poptorch.trainingModel(Step(lambda h: (seen.append(poptorch.isRunningOnIpu()), h)[1]))
    assert not poptorch.isRunningOnIpu()
    executor(torch.randn(3, 4))
    assert seen == [True] and not poptorch.isRunningOnIpu()
    executor.destroy()


def test_hooks_around_compilation() -> None:
    """python/_poplar_executor.py:1595-1625: global, removable, callable."""
    order: List[str] = []
    first = poptorch.registerPreCompileHook(lambda: order.append("pre"))
    last = poptorch.registerPostCompileHook(lambda: order.append("post"))
    compile_step(lambda h: (order.append("forward"), h)[1])
    first.remove()
    last.remove()
    compile_step(lambda h: h)
    assert order == ["pre", "forward", "post"]
    with pytest.raises(RuntimeError):
        poptorch.registerPreCompileHook(3)


def test_parameters_lose_their_attributes_while_tracing() -> None:
    """python/_poplar_executor.py:737-740: fresh parameters; the host's object keeps what it carries."""
    seen: List[Any] = []
    model = Step()
    model.layer.weight.infshape = "kept"
    model.middle = lambda h: (seen.append((hasattr(model.layer.weight, "infshape"), type(model.layer.weight))), h)[1]
    executor = poptorch.trainingModel(model)
    executor(torch.randn(3, 4))
    assert seen == [(False, nn.Parameter)]
    assert model.layer.weight.infshape == "kept"
    executor.destroy()


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("read", [lambda h: h * h.sum().item(), lambda h: h if h.sum() > 0 else -h, lambda h: h * float(h[0, 0]),
                                  lambda h: h + h.sum().tolist(), lambda h: h.cpu(), lambda h: (str(h), h)[1],
                                  lambda h: h + torch.from_numpy(h.detach().numpy())])
def test_reading_a_value_on_the_host_is_an_error(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """poptorch/source/dispatch_tracer/RegisterAtenOverloads.cpp:308-311,505-511."""
    with pytest.raises(poptorch.Error, match="test_trace.py"):
        compile_step(read)


@pytest.mark.parametrize("shape", [lambda h: h[h > 0], lambda h: h.masked_select(h > 0), lambda h: h.nonzero().float(),
                                   lambda h: torch.unique(h.argmax(-1)).float(),
                                   lambda h: h.repeat_interleave(h.argmax(-1), dim=0)])
def test_a_shape_that_depends_on_data_is_an_error(shape: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """RegisterMetaOps.cpp.inc:240 (nonzero); no handlers for the others."""
    with pytest.raises(poptorch.Error, match="depends on the data"):
        compile_step(shape)


@pytest.mark.parametrize(("name", "middle"), [
    ("lerp", lambda h: torch.lerp(h, h * 2, 0.5)), ("searchsorted", lambda h: torch.searchsorted(h[0].detach(), h.detach()) * h),
    ("index_add", lambda h: h.index_add(0, torch.tensor([0, 1]), h[:2])), ("tril", torch.tril),
    ("huber_loss", lambda h: F.huber_loss(h, h.detach() + 1))])
def test_an_op_without_handler_is_an_error_with_its_place(name: str, middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """poptorch/source/ErrorOnUnsupportedAten.cpp:30; the list is the contract's."""
    with pytest.raises(poptorch.Error, match=rf"Unsupported ops found in compiled model: \[aten::{name}.*test_trace.py:\d+"):
        compile_step(middle)


def test_the_message_names_the_module() -> None:
    class Inner(nn.Module):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return torch.lerp(h, h * 2, 0.5)

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Inner()), Step())
    with pytest.raises(poptorch.Error, match="module `1.0`"):
        poptorch.trainingModel(model).compile(torch.randn(2, 4))


def test_fused_attention_is_refused() -> None:
    """poptorch/source/ErrorOnUnsupportedAten.cpp:30: scaled_dot_product_attention has no handler."""
    with pytest.raises(poptorch.Error, match="scaled_dot_product_attention"):
        compile_step(lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None]))


def test_dead_code_is_not_checked() -> None:
    """LowerToPopartFactories.cpp:37: dead code is eliminated before lowering."""
    assert compile_step(lambda h: (torch.lerp(h, h * 2, 0.5), h)[1]).isCompiled()


def test_ops_of_constants_run_on_the_host() -> None:
    """EvaluateConstexprs.cpp:318-343: a mask may be built in forward, with ops that have no handler (tril)."""
    executor = poptorch.trainingModel(Step(lambda h: h @ torch.tril(torch.full((4, 4), 2.0))))
    x = torch.randn(3, 4)
    weight, bias = executor.model.layer.weight.clone(), executor.model.layer.bias.clone()
    loss = executor(x)
    expected = ((x @ weight.t() + bias) @ torch.tril(torch.full((4, 4), 2.0))).mean()
    assert torch.allclose(loss, expected)
    executor.destroy()


def test_a_constant_written_after_it_was_read_keeps_its_order() -> None:
    def middle(h: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(4)
        before = h + mask
        mask.add_(5.0)
        return before + mask

    executor = poptorch.inferenceModel(Step(middle))
    model = Step(middle)
    model.load_state_dict(executor.model.state_dict())
    x = torch.randn(3, 4)
    for _ in range(2):
        assert torch.allclose(executor(x), model(x))
    executor.destroy()


def test_a_host_tensor_in_forward_is_an_error_and_a_factory_is_not() -> None:
    """TypeInferenceHandler.cpp:256-271; factories are forced to the IPU, _poplar_executor.py:36-101."""
    host = torch.randn(4)
    with pytest.raises(poptorch.Error, match="CPU tensor"):
        compile_step(lambda h: h + host)
    with pytest.raises(poptorch.Error, match="CPU tensor"):
        compile_step(lambda h: h + torch.eye(4)[0])  # torch.eye is not wrapped
    compile_step(lambda h: h + host.to(h.device) + torch.ones(4) + torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.arange(4))
    assert torch.ones(1).device.type == "cpu" and torch.tensor([1]).device.type == "cpu"


def test_reassigning_a_buffer_is_an_error_and_batch_norm_is_exempt() -> None:
    """python/_impl.py:28-35, 432-451."""
    class Reassigns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return x * self.count

    model = Reassigns()
    with pytest.raises(poptorch.Error, match="re-assigned"):
        poptorch.inferenceModel(model)(torch.ones(1))
    assert torch.equal(model.count, torch.zeros(1))
    executor = poptorch.inferenceModel(nn.BatchNorm1d(3).train())
    executor(torch.randn(4, 3))
    executor.destroy()


def test_other_threads_are_on_plain_cpu() -> None:
    """A loader that works ahead makes real tensors while another thread traces."""
    import threading

    seen: List[Any] = []

    def middle(h: torch.Tensor) -> torch.Tensor:
        def load() -> None:
            loss = poptorch.identity_loss(torch.ones(2), "sum")
            seen.extend([torch.zeros(2), torch.tensor([1.0]), poptorch.isRunningOnIpu(), loss])

        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        return h

    compile_step(middle)
    assert [item if isinstance(item, bool) else item.device.type for item in seen] == ["cpu", "cpu", False, "cpu"]
