"""Set-ups that PopTorch or PopART would refuse, or accept without doing what they say: each is refused with its numbers."""

import pytest

from ipu_lean.config import load_config
from ipu_lean.config.layout import eval_device_iterations, layout, loss_scaling, stages
from ipu_lean.errors import ConfigError

pytestmark = pytest.mark.pod

BASE = """
device: ipu-emulated
mup: {base_width: 64}
model: {depth: 6}
batch: {accumulation: 9}
"""
REFUSED = [
    # the pipeline
    ("batch.accumulation", ["ipu.layers_per_ipu=[3, 3]", "batch.accumulation=4"], "0-1-0.* F = 3 .*2F-1 = 5"),
    ("batch.accumulation", ["ipu.layers_per_ipu=[0, 2, 2, 2]", "batch.accumulation=8"], "0-1-2-3-0.* F = 5 .*2F-1 = 9"),
    ("batch.accumulation", ["ipu.layers_per_ipu=[3, 3]", "model.tied=false", "batch.accumulation=2"], "F = 2 .*2F-1 = 3"),
    ("batch.accumulation", ["ipu.layers_per_ipu=[3, 3]", "model.tied=false", "ipu.embedding_ipu=1", "batch.accumulation=6"],
     "0-1-0-1.*2F-1 = 7"),
    ("ipu.eval_device_iterations", ["ipu.layers_per_ipu=[3, 3]", "ipu.eval_device_iterations=2"], "F = 3"),
    # placement
    ("ipu.layers_per_ipu", ["ipu.layers_per_ipu=[3, 2]"], "placed are 5, and model.depth is 6"),
    ("ipu.layers_per_ipu", ["ipu.layers_per_ipu=[3, -2]"], "-1 for a share"),
    ("ipu.layers_per_ipu", ["ipu.layers_per_ipu=[7, -1]"], "placed are 7"),
    ("ipu.layers_per_ipu", ["ipu.layers_per_ipu=[2, 2, 2]"], "3 IPUs a replica x 1 replica = 3 IPUs.*power of two"),
    ("ipu.layers_per_ipu", ["ipu.layers_per_ipu=[3, 0, 0, 3]"], "IPU 1 would hold nothing"),
    ("ipu.layers_per_ipu", ["ipu.layers_per_ipu=[3, 3, 0, 0]"], "IPU 2 would hold nothing"),
    ("batch.replicas", ["batch.replicas=3"], "1 IPU a replica x 3 replicas = 3 IPUs.*2 or 4"),
    ("ipu.head_ipu", ["ipu.layers_per_ipu=[3, 3]", "ipu.head_ipu=1"], "shares the embedding's matrix, which lives on IPU 0"),
    ("ipu.head_ipu", ["ipu.layers_per_ipu=[3, 3]", "ipu.head_ipu=1", "ipu.execution=sharded"], "two IPUs"),
    ("ipu.layers_per_ipu", ["ipu.layers_per_ipu=[3, 3]", "model.num_hidden_groups=1"], "layer 3 shares its weights"),
    ("ipu.layers_per_ipu", ["ipu.layers_per_ipu=[3, 3]", "model.stack.order=aaff"], "layers 2 and 3"),
    ("ipu.matmul_proportion", ["ipu.layers_per_ipu=[3, 3]", "ipu.matmul_proportion=[0.2]"], "1 shares for 2 IPUs"),
    ("ipu.matmul_proportion", ["ipu.matmul_proportion=1.5"], "at most 1"),
    ("ipu.matmul_proportion", ["ipu.matmul_proportion=[0.2, 0.0]"], "greater than 0"),
    # numbers
    ("precision", ["precision=bf16-mixed"], "no bf16"),
    ("precision", ["precision=bf16-pure"], "no bf16"),
    ("precision", ["precision=fp16-mixed"], "ignores autocast"),
    ("precision", ["precision=fp16-ipu"], "emulate_precision: true"),
    ("ipu.loss_scaling", ["ipu.loss_scaling=auto"], "accumulators are float32"),
    ("ipu.loss_scaling", ["ipu.loss_scaling=auto", "ipu.accumulator=half"], "is for fp16"),
    ("ipu.loss_scaling", ["ipu.loss_scaling=-1.0"], "positive"),
    ("train.clip", ["optimizer.kind=adam"], "before it clips"),
    # what PopTorch ignores or lacks
    ("model.attention", ["model.attention=fused"], "no fused"),
    ("memory.engine", ["memory.engine=invert"], "ignores Python's backward"),
    ("memory.engine", ["memory.engine=checkpoint"], "ignores Python's backward"),
    ("train.processes", ["train.processes=2", "batch.replicas=2"], "one process drives"),
    ("train.strategy", ["train.strategy=fsdp"], "one process drives"),
    ("ipu.replicated_tensor_sharding", ["ipu.replicated_tensor_sharding=true"], "one replica"),
    # batching, on every device
    ("train.steps", ["batch.device_iterations=3"], "multiple of it"),
    ("train.eval_every", ["batch.device_iterations=8", "train.save_every=8"], "multiple of it"),
    # kinds
    ("ipu.layers_per_ipu", ["ipu.layers_per_ipu=[3.0, 3]"], "whole number"),
    ("ipu.execution", ["ipu.execution=pipeline"], "pipelined"),
    ("ipu.partials", ["ipu.partials=fp16"], "float, half"),
    ("ipu.stochastic_rounding", ["ipu.stochastic_rounding=1"], "true or false"),
    ("ipu.offline_target", ["ipu.offline_target=3"], "ipu2"),
    ("ipu.engine_options.debug", ["ipu.engine_options={debug: true}"], "text"),
    ("ipu.layer_per_ipu", ["ipu.layer_per_ipu=[6]"], "layers_per_ipu"),
]


@pytest.mark.parametrize("key, overrides, message", REFUSED, ids=[" ".join(case[1]) for case in REFUSED])
def test_refused(key, overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(BASE, overrides)
    assert caught.value.key == key


ACCEPTED = [
    ["ipu.layers_per_ipu=[0, 2, 2, 2]"],
    ["ipu.layers_per_ipu=[0, -1]", "batch.accumulation=5"],
    ["ipu.layers_per_ipu=[3, 3]", "batch.accumulation=1", "ipu.execution=sharded"],
    ["ipu.layers_per_ipu=[3, 3]", "batch.accumulation=3", "model.tied=false"],
    ["ipu.layers_per_ipu=[3, 3]", "model.num_hidden_groups=2"],
    ["ipu.layers_per_ipu=[2, 4]", "model.stack.order=aaff"],
    ["batch.accumulation=1"],
    ["batch.replicas=4", "ipu.replicated_tensor_sharding=true", "ipu.optimizer_state_offchip=true"],
    ["precision=fp16-ipu", "ipu.emulate_precision=true", "ipu.loss_scaling=auto"],
    ["precision=fp16-ipu", "device=ipu", "ipu.partials=half", "ipu.loss_scaling=32768"],
    ["optimizer.kind=adam", "train.clip=null"],
    ["device=ipu", "precision=fp16-ipu", "ipu.emulate_precision=true"],
    ["optimizer.kind=adam", "optimizer.weight_decay=0.0"],
    ["ipu.engine_options={target.x: 'true'}", "ipu.matmul_proportion=0.15", "ipu.executable_cache=cache"],
]


@pytest.mark.parametrize("overrides", ACCEPTED, ids=[" ".join(case) for case in ACCEPTED])
def test_accepted(overrides):
    assert load_config(BASE, overrides).batch.micro == 8


def test_other_devices_mirror_the_run_and_have_no_pipeline():
    config = load_config(BASE, ["device=cpu", "ipu.layers_per_ipu=[2, 2, 2]", "batch.accumulation=1"])
    assert layout(config).layers == (2, 2, 2)


def test_numbers_that_follow():
    config = load_config(BASE, ["ipu.layers_per_ipu=[0, 2, 2, 2]"])
    assert (stages(config), layout(config).ipus, eval_device_iterations(config), loss_scaling(config)) == (5, 4, 5, 1.0)
    alone = load_config(BASE, ["batch.device_iterations=4"])
    assert (stages(alone), layout(alone).ipus, eval_device_iterations(alone)) == (1, 1, 4)
    sharded = load_config(BASE, ["ipu.layers_per_ipu=[3, 3]", "ipu.execution=sharded"])
    assert (stages(sharded), layout(sharded).path) == (1, [0, 1, 0])
