"""What the surrogate step is made of, and what is refused."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any, Dict, Tuple

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.config import load_config
from ipu_lean.errors import ConfigError, RunError
from ipu_lean.ipu import PopTrainStep, SurrogateStep, contract, make_optimizer, make_options, make_step, place, to_precision
from ipu_lean.ipu.check import check, format_check
from ipu_lean.ipu.emulator import optable
from ipu_lean.ipu.emulator.examine import examine
from ipu_lean.ipu.emulator.kept import Kept, kept_for_backward
from ipu_lean.ipu.walk import has_handler
from ipu_lean.models import build_meta
from ipu_lean.nn import Embedding
from ipu_lean.reversible.module_vjp import ModuleVJP
from ipu_lean.reversible.vjp import Underivable
from tests.ipu.helpers import VOCAB, batch_for, ipu_config, lively
from tests.ipu.test_surrogate import surrogate_config

pytestmark = pytest.mark.pod


def tensors(config: Any, seed: int = 0) -> Tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(array) for array in batch_for(config, config.batch.device_iterations, seed))


def looked_at(config: Any) -> Any:
    model = to_precision(lively(config), config)
    step = make_step(model, config, poptorch)
    place(model, config, poptorch)
    options = make_options(config, poptorch).train
    return examine(step, tensors(config), options=options, optimizer=make_optimizer(model, config, poptorch))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"norm": "rmsnorm", "activation": "swiglu", "sandwich": True, "tied": False}, "memory": {"loss_chunk": 5}},
        {"model": {"dropout": 0.1, "attention_dropout": 0.1}, "precision": "fp16-ipu", "ipu": {"emulate_precision": True}},
        {"model": {"stack": {"coupling": "affine", "output": "gate"}, "activation": "relu"}},
    ],
    ids=["gated, untied, chunked", "dropout, fp16", "affine, gate"],
)
def test_every_operation_has_a_handler_and_means_what_it_says(changes: Dict[str, Any]) -> None:
    """Beside the contract: nothing that PopTorch takes and ignores, such as autograd functions or accumulating writes."""
    memory = {"ipu_backward": "surrogate", **changes.pop("memory", {})}
    report = looked_at(surrogate_config(memory=memory, **changes))
    assert [str(item) for item in (*report.violations, *report.notes)] == []
    assert report.functions == {}
    handlers = contract.handlers()
    names = {row["op"] for row in report.ops if not row["constant"] and row["op"].startswith("aten::")}
    known = {name: f"aten::{optable._SAME.get(optable.base_name(name), optable.base_name(name))}" for name in names}
    lost = {name for name in names if name not in handlers and known[name] not in handlers}
    # torch shows a dropout in pieces that PopTorch takes whole.
    assert "dropout" in contract.intercepted()
    assert lost == ({"aten::empty_like"} if "dropout" in changes.get("model", {}) else set())
    assert not [name for name in names if "index_put" in name]
    assert {"aten::mm", "aten::detach"} <= names


def test_only_the_weights_and_the_embedding_are_left_to_differentiate() -> None:
    """Every product of a weight is with a gradient of its own shape."""
    report = looked_at(surrogate_config())
    parameters = [node for node in report.trace.recorder.graph.nodes if node.meta.get("kind") == "parameter"]
    assert len(parameters) > 60
    for node in parameters:
        direct = {user.meta["op"] for user in node.users if user in report.trace.live}
        assert direct <= {"aten::detach", "aten::mul", "aten::embedding"}, node.meta["name"]


class Counting(SurrogateStep):
    """Counts calls of its own forward."""

    calls = 0

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        Counting.calls += 1
        return super().forward(tokens, labels)


def test_forward_runs_once_and_evaluation_is_the_plain_step() -> None:
    config = surrogate_config()
    model = lively(config)
    step = Counting(model, poptorch, config)
    executor = poptorch.trainingModel(step, make_options(config, poptorch).train, make_optimizer(model, config, poptorch))
    for seed in range(3):
        loss, sums, _ = executor(*tensors(config, seed))
    assert Counting.calls == 1
    assert loss.shape == (6,) and sums.shape == (18,)
    executor.destroy()
    step.eval()
    tokens, labels = tensors(config)
    for one, other in zip(step(tokens, labels), PopTrainStep(model, poptorch).eval()(tokens, labels)):
        assert torch.equal(one, other)


def test_the_reported_loss_is_the_models() -> None:
    config = surrogate_config()
    model = lively(config)
    tokens, labels = (tensor[: config.batch.micro] for tensor in tensors(config))
    loss, sums, marked = SurrogateStep(model, poptorch, config)(tokens, labels)
    wanted, counted = PopTrainStep(model, poptorch)(tokens, labels)
    assert not loss.requires_grad and abs(loss.item() - wanted.item()) < 1e-6
    torch.testing.assert_close(sums, counted, rtol=1e-6, atol=0)
    assert abs(marked.item() - wanted.item()) > 1e-3


def test_popart_is_not_told_to_recompute() -> None:
    recomputing = surrogate_config(memory={"ipu_backward": "recompute"})
    assert make_options(recomputing, poptorch).train._popart.options["autoRecomputation"] == 4
    assert "autoRecomputation" not in make_options(surrogate_config(), poptorch).train._popart.options


def test_placement_follows_the_walk_back() -> None:
    report = looked_at(surrogate_config(ipu={"layers_per_ipu": [2, 2], "execution": "sharded"}))
    assert report.violations == []
    path = [0]
    for row in report.ops:
        if not row["constant"] and row["ipu"] != path[-1]:
            path.append(row["ipu"])
    assert path == [0, 1, 0, 1, 0]  # layers, the tied readout, and the layers again


def test_check_knows_it() -> None:
    result = check(surrogate_config())
    assert result.verdict == "pass" and "aten::rsqrt" in {row["op"] for row in result.found.ops}
    text = format_check(result)
    parameters = sum(parameter.numel() * 4 for parameter in lively(surrogate_config()).parameters())
    assert f"{result.found.kept.activations:,} bytes of activations, {parameters:,} of gradients (one copy of 67" in text


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"ipu": {"layers_per_ipu": [2, 2]}, "batch": {"accumulation": 9}}, "5 forward stages in place of 3"),
        ({"model": {"stack": {"kind": "residual"}}}, "residual stack cannot be walked backwards"),
        (
            {"model": {"depth": 16, "stack": {"coupling": "momentum", "beta": 0.2}}, "ipu": {"layers_per_ipu": [16]}},
            "undoing 32 half-steps",
        ),
        ({"precision": "fp16-ipu", "ipu": {"emulate_precision": True, "loss_scaling": "auto"}}, "PopART cannot adapt it"),
    ],
)
def test_what_cannot_be_done_is_refused(changes: Dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        surrogate_config(**changes)


def test_a_network_without_a_stack_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory.ipu_backward: .surrogate.*an mlp"):
        load_config("configs/cifar_mlp.yaml", ["device=ipu-emulated", "memory.ipu_backward=surrogate"])


def test_fp16_streams_are_widened_and_so_may_be_inverted() -> None:
    """fp16 streams of this coupling would be refused; the walk keeps them in float32."""
    half = {"precision": "fp16-ipu", "ipu": {"emulate_precision": True}, "model": {"stack": {"coupling": "momentum"}}}
    config = surrogate_config(**half)
    report = looked_at(config)
    nodes = [node for node in report.trace.recorder.graph.nodes if node.meta.get("kind") == "op" and node in report.trace.live]
    streams = {node.meta["dtype"] for node in nodes if node.meta["op"] == "aten::sub" and node.meta["shape"] == (2, 8, 16)}
    products = {node.meta["dtype"] for node in nodes if node.meta["op"] in ("aten::mm", "aten::bmm", "aten::addmm")}
    assert report.violations == [] and streams == {torch.float32} and products == {torch.float16}


def test_other_devices_do_not_read_it() -> None:
    config = ipu_config(device="cpu", memory={"ipu_backward": "surrogate"}, model={"stack": {"kind": "residual"}})
    assert config.memory.ipu_backward == "surrogate"


def test_another_shape_is_refused_in_a_trace() -> None:
    config = surrogate_config()
    model = lively(config)
    step = SurrogateStep(model, poptorch, config)
    executor = poptorch.trainingModel(step, make_options(config, poptorch).train, make_optimizer(model, config, poptorch))
    with pytest.raises(RunError, match="derived for micro-batches of 2 x 8 tokens, and is traced with 4 x 8"):
        executor.compile(*[torch.cat([tensor, tensor]) for tensor in tensors(config)])


def test_a_step_can_be_copied_and_pickled() -> None:
    config = surrogate_config()
    step = SurrogateStep(lively(config), poptorch, config)
    batch = tuple(tensor[: config.batch.micro] for tensor in tensors(config))
    marked = step(*batch)[2]
    for other in (deepcopy(step), pickle.loads(pickle.dumps(step))):
        again = other(*batch)[2]
        assert torch.equal(again, marked)
        again.backward()
        assert all(parameter.grad is not None for parameter in other.parameters())
    assert all(parameter.grad is None for parameter in step.parameters())


class Looking(nn.Module):
    """A branch that looks its own vectors up: PopTorch would lose all but one of the gradients of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Embedding(5, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.detach().argmax(-1) % 5) * x


def test_a_derivative_that_poptorch_ignores_is_refused() -> None:
    with pytest.raises(Underivable, match="embedding_dense_backward|index_put"):
        ModuleVJP(Looking(), has_handler).pullback((torch.zeros(2, 8, 16),))
    config = surrogate_config()
    model = lively(config)
    model.layers.blocks[0].branches[1] = Looking()
    with pytest.raises(ConfigError, match="cannot be written in PopTorch's operations") as caught:
        SurrogateStep(model, poptorch, config)
    assert caught.value.key == "memory.ipu_backward"


def kept(mode: str, depth: int, **model: Any) -> Kept:
    """Of a step of that many layers, without CompleteP, whose multiplier is a tensor more or less."""
    config = surrogate_config(
        memory={"ipu_backward": mode},
        model={"depth": depth, **model},
        ipu={"layers_per_ipu": [depth]},
        mup={"depth_rule": "none"},
    )
    made = build_meta(config, VOCAB)
    step = make_step(made, config, poptorch)
    place(made, config, poptorch)
    options = make_options(config, poptorch).train
    report = examine(step, tensors(config), options=options)
    assert report.violations == []
    return kept_for_backward(report.trace, options)


def test_activations_are_flat_in_depth_and_gradients_one_copy_a_parameter() -> None:
    shallow, deep = (kept("surrogate", depth) for depth in (3, 5))
    stream = 2 * 8 * 16 * 4
    assert deep.activations == shallow.activations <= 2 * stream
    assert deep.forward == shallow.forward and deep.recomputed == 0
    parameters = dict(lively(surrogate_config()).named_parameters())
    assert kept("surrogate", 4).gradients == {f"model.{name}": parameter.numel() * 4 for name, parameter in parameters.items()}
    shared = kept("surrogate", 4, num_hidden_groups=1)
    assert sum(shared.gradients.values()) < sum(deep.gradients.values()) / 2  # one copy, however often a layer is visited


def test_recomputation_keeps_two_streams_a_layer() -> None:
    shallow, deep = (kept("recompute", depth) for depth in (2, 6))
    stream = 2 * 8 * 16 * 4
    assert deep.activations - shallow.activations == 4 * 2 * stream
    assert deep.gradients == {} and deep.recomputed == shallow.recomputed > stream


def test_dropout_masks_are_held_from_one_walk_to_the_other() -> None:
    dropped = {"dropout": 0.1, "attention_dropout": 0.1}
    shallow, deep = (kept("surrogate", depth, **dropped) for depth in (3, 5))
    a_layer = 2 * (2 * 8 * 16) + 2 * 2 * 8 * 8  # bool: both branches' outputs, attention weights
    assert deep.activations == shallow.activations
    assert deep.forward - shallow.forward == 2 * a_layer
