"""Blocks, stages, IPUs (docs/user_guide/overview.rst)."""
from __future__ import annotations

import copy
from typing import Any, Callable, List, Sequence

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.ipu.emulator import machine

from .common import gap, options, plain_steps

pytestmark = pytest.mark.pod
Auto = poptorch.AutoStage


class Chain(nn.Module):
    """Layers in a row; optionally the first layer's weight again at the end."""

    def __init__(self, layers: int, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.loss = nn.MSELoss()
        if tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return poptorch.identity_loss(x.square(), "mean")


def placed(ipus: Sequence[int], tied: bool = False) -> Chain:
    torch.manual_seed(0)
    model = Chain(len(ipus), tied)
    for layer, ipu in zip(model.layers, ipus):
        poptorch.BeginBlock(layer, ipu_id=ipu)
    return model


def build(model: nn.Module, made: poptorch.Options) -> poptorch.PoplarExecutor:
    executor = poptorch.trainingModel(model, made)
    executor.compile(torch.randn(2 * made.Training.gradient_accumulation * made.replication_factor * made.device_iterations, 4))
    return executor


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_training_needs_two_f_minus_one_accumulation_steps(stages: int) -> None:
    """popart_compiler/source/Compiler.cpp:672-702, CompilerImpl.cpp:478-495. 4 stages: 6 fails, 7 passes."""
    needed = 2 * stages - 1
    if needed > 1:
        with pytest.raises(poptorch.Error, match=rf"gradientAccumulation \({needed - 1}\).*= {needed} in training"):
            build(placed(range(stages)), options(needed - 1))
    build(placed(range(stages)), options(needed)).destroy()


def test_inference_needs_f_device_iterations() -> None:
    """Compiler.cpp:690-702."""
    model = placed(range(2))
    with pytest.raises(poptorch.Error, match=r"deviceIterations \(1\).*stages \(2\)"):
        poptorch.inferenceModel(model, options(1, 1)).compile(torch.randn(2, 4))
    poptorch.inferenceModel(model, options(1, 2)).compile(torch.randn(4, 4))


def test_consecutive_blocks_on_one_ipu_are_one_stage() -> None:
    """Compiler.cpp:1253-1297: each change of IPU starts a stage."""
    build(placed([0, 0, 1, 1]), options(3)).destroy()
    with pytest.raises(poptorch.Error, match="3 in training"):
        build(placed([0, 0, 1, 1]), options(2))


def test_counting_starts_at_ipu_0() -> None:
    """CompilerImpl.hpp:261: a first block on IPU 1 adds a stage."""
    with pytest.raises(poptorch.Error, match="2 forward stages"):
        build(placed([1]), options(1))


def test_pipelined_training_equals_plain_torch() -> None:
    """Placement changes no number."""
    model = placed([0, 1])
    plain = copy.deepcopy(model)
    executor = poptorch.trainingModel(model, options(3, 2), poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)

    class WithTuple(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return (plain(x),)

    for _ in range(3):
        x = torch.randn(12, 4)
        executor(x)
        list(plain_steps(WithTuple(), optimizer, (x,), 2, 3))
    assert gap(model, plain) < 1e-5
    executor.destroy()


def test_going_back_to_an_ipu_needs_auto_increment() -> None:
    """docs/user_guide/overview.rst:394-411: stage ids ascend along the dataflow; 0-1-2-0 with AutoIncrement is 4 stages."""
    with pytest.raises(poptorch.Error, match="must ascend"):
        build(placed([0, 1, 2, 0]), options(8))
    increment = poptorch.PipelinedExecution(Auto.AutoIncrement)
    with pytest.raises(poptorch.Error, match=r"4 forward stages make 2 \* 4 - 1 = 7"):
        build(placed([0, 1, 2, 0], tied=True), options(6).setExecutionStrategy(increment).autoRoundNumIPUs(True))
    build(placed([0, 1, 2, 0], tied=True), options(7).setExecutionStrategy(increment).autoRoundNumIPUs(True)).destroy()


def test_tied_weights_on_two_ipus() -> None:
    """popart transforms/pipeline.cpp:141-145 refuses it; sharded execution copies (transforms/interipucopy.cpp:473-556)."""
    with pytest.raises(poptorch.Error, match=r"Can not copy variable tensor layers.0.weight.*IPUs \[0, 1\]"):
        build(placed([0, 1], tied=True), options(3))
    build(placed([0, 1], tied=True), options(1).setExecutionStrategy(poptorch.ShardedExecution())).destroy()


def test_sharded_execution_has_no_accumulation_minimum() -> None:
    """docs/user_guide/overview.rst: only pipelined execution needs as many micro-batches as it has stages."""
    executor = build(placed(range(4)), options(1).setExecutionStrategy(poptorch.ShardedExecution()))
    assert executor.isCompiled()
    executor.destroy()


def test_ipus_are_a_power_of_two() -> None:
    """CompilerImpl.cpp:234-239, 693-718."""
    with pytest.raises(poptorch.Error, match="use of 3 IPUs.*power of 2: 4"):
        build(placed(range(3)), options(5))
    build(placed(range(3)), options(5).autoRoundNumIPUs(True)).destroy()
    build(placed(range(3)), options(5).useIpuModel(True)).destroy()
    executor = poptorch.trainingModel(placed(range(3)), options(5).useOfflineIpuTarget())
    executor.compile(torch.randn(5, 4))
    with pytest.raises(AssertionError, match="offline"):
        executor(torch.randn(5, 4))


def test_gaps_in_ipu_ids_are_paid_for() -> None:
    """CompilerImpl.cpp:634-636: max(distinct, highest + 1), for each replica."""
    with pytest.raises(poptorch.Error, match="use of 6 IPUs"):
        build(placed([0, 5]), options(3))
    with pytest.raises(poptorch.Error, match="use of 12 IPUs"):
        build(placed([0, 1, 2, 3]), options(7, 1, 3))


def test_at_most_64_ipus_a_process() -> None:
    """CompilerImpl.cpp:234-239."""
    with pytest.raises(poptorch.Error, match=r"\(128\).*distributed"):
        build(placed([0, 1]), options(3, 1, 64))


def test_same_as_ipu_needs_an_ipu() -> None:
    """python/options.py:716-731."""
    model = Chain(2)
    poptorch.BeginBlock(model.layers[1], "named")
    with pytest.raises(AssertionError, match="needs an ipu_id"):
        build(model, options(3))


def test_stages_by_block_name() -> None:
    """python/options.py:806-921: the stage's own IPU overrides; with neither, the IPU is the stage's number."""
    model = Chain(2)
    poptorch.BeginBlock(model.layers[0], "a", ipu_id=5)
    poptorch.BeginBlock(model.layers[1], "b")
    strategy = poptorch.PipelinedExecution(poptorch.Stage("a").ipu(0), "b")
    executor = build(model, options(3).setExecutionStrategy(strategy))
    rows = executor._trace.ops()
    assert {(row["module"], row["ipu"]) for row in rows if row["module"]} == {("layers.0", 0), ("layers.1", 1)}
    executor.destroy()
    with pytest.raises(AssertionError, match="Unknown Block 'b'"):
        build(model, options(3).setExecutionStrategy(poptorch.PipelinedExecution("a")))


def forward_with(body: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return body(self, x)

    return Model()


def test_an_op_after_a_closed_block_fails() -> None:
    """CompilerImpl.cpp:424-427; docs/user_guide/overview.rst:336-341."""
    def body(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with poptorch.Block("a", ipu_id=0):
            x = m.one(x)
        return poptorch.identity_loss(m.two(x), "mean")

    with pytest.raises(poptorch.Error, match="No active Block.*test_pipeline.py"):
        build(forward_with(body), options(1))


def test_an_inner_blocks_exit_clears_the_outer_one() -> None:
    """poptorch/source/LowerToPopart.cpp:689."""
    def body(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with poptorch.Block("a", ipu_id=0):
            with poptorch.Block("b", ipu_id=1):
                x = m.one(x)
            return poptorch.identity_loss(m.two(x), "mean")

    with pytest.raises(poptorch.Error, match="No active Block"):
        build(forward_with(body), options(3))


def test_block_function_and_automatic_ids() -> None:
    """python/ops.py:558-622, 746: ids count from "0" after useAutoId."""
    @poptorch.BlockFunction(ipu_id=1)
    def second(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(m.two(x), "mean")

    def body(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        poptorch.Block.useAutoId()
        with poptorch.Block():
            x = m.one(x)
        return second(m, x)

    strategy = poptorch.PipelinedExecution(poptorch.Stage("0").ipu(0), poptorch.Stage("1"))
    executor = build(forward_with(body), options(3).setExecutionStrategy(strategy))
    assert {row["ipu"] for row in executor._trace.ops()} == {0, 1} and executor._trace.forward_stages == 2
    executor.destroy()


def test_begin_block_is_a_hook_on_the_same_module() -> None:
    """python/ops.py:675-738: a second time is an Error; removeBlocks strips; a callable is wrapped; anything else is an Error."""
    layer = nn.Linear(4, 4)
    assert poptorch.BeginBlock(layer, ipu_id=0) is layer
    with pytest.raises(poptorch.Error, match="already been assigned"):
        poptorch.BeginBlock(layer, ipu_id=1)
    poptorch.removeBlocks(layer)
    poptorch.BeginBlock(layer, ipu_id=1)
    assert poptorch.BeginBlock(lambda x: x + 1, "f")(torch.zeros(1)).item() == 1
    with pytest.raises(poptorch.Error):
        poptorch.BeginBlock(3)


def test_blocks_do_nothing_on_cpu() -> None:
    """python/ops.py:577: no stages manager."""
    model = placed([0, 1, 2, 0])
    with poptorch.Block("x", ipu_id=7):
        assert torch.isfinite(model(torch.randn(2, 4)))


def test_pre_hooks_before_begin_block_land_in_the_previous_block() -> None:
    """docs/user_guide/overview.rst:287-295."""
    model = Chain(2)
    model.layers[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    poptorch.BeginBlock(model.layers[1], ipu_id=1)
    executor = build(model, options(3))
    where = {row["op"]: row["ipu"] for row in executor._trace.ops()}
    assert where["aten::mul"] == 0 and where["aten::addmm"] == 1
    executor.destroy()


def test_phases_must_be_listed_and_parallel_ones_alternate() -> None:
    """python/options.py:949-1142."""
    phases = poptorch.SerialPhasedExecution(["a"], [poptorch.Stage("b")], poptorch.Phase("c"))
    phases.phase(2).ipus(1)
    assert phases.phase(2).stage(0)._ipu == 1 and phases.backendOptions()["execution_mode"] == 2
    with pytest.raises(AssertionError):
        phases.phase(0).ipus(0, 1)


def test_one_attached_executor_holds_the_machine() -> None:
    """python/_poplar_executor.py:1553-1592: detaching frees the IPUs. A machine of known size is shared while it has room."""
    first, second = build(placed([0, 1]), options(3)), poptorch.trainingModel(placed([0, 1]), options(3))
    with pytest.raises(poptorch.Error, match=r"Failed to acquire 2 IPU\(s\)"):
        second.compile(torch.randn(6, 4))
    first.detachFromDevice()
    second.compile(torch.randn(6, 4))
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        first(torch.randn(6, 4))
    second.destroy()
    first.attachToDevice()
    machine.set_machine(4)
    try:
        third = build(placed([0, 1]), options(3))
        assert poptorch.ipuHardwareIsAvailable(4) and not poptorch.ipuHardwareIsAvailable(8)
        third.destroy()
    finally:
        machine.set_machine(None)
    first.destroy()


def test_notes_of_the_trace_are_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: List[Any] = []
    executor = build(placed([0]), options(1))
    seen += executor._trace.notes
    executor.destroy()
    assert seen == []
