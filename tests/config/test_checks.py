"""Rules that join keys: each case breaks one rule, and the error names the key and a way out."""

import importlib.util

import pytest

from ipu_lean.config import load_config, make_config, require_device
from ipu_lean.errors import ConfigError, EnvironmentProblem

pytestmark = pytest.mark.pod

BROKEN = [
    ("model.heads", ["model.heads=7"], "divide model.width.* 8"),
    ("model.heads", ["model.width=200"], "width // 64 = 3"),
    ("model.head_size", ["model.head_size=48"], "divide model.width"),
    ("model.heads", ["model.width=12", "model.heads=4", "mup.base_width=4"], "in pairs"),
    ("model.width", ["model.width=63", "model.heads=1", "model.positions=sinusoidal"], "even width"),
    ("model.ffn_ratio", ["model.ffn_ratio=1e-3"], "rounds to zero"),
    ("model.num_inner_groups", ["model.num_inner_groups=4"], "divide model.depth"),
    ("model.num_hidden_groups", ["model.num_hidden_groups=7"], "only 6 visits"),
    ("model.depth", ["model.depth=5", "model.stack.order=aaff"], "even"),
    ("model.depth", ["model.stack.order=aaff", "model.num_inner_groups=3"], "even"),
    ("model.stack.beta", ["model.stack.beta=0.9"], "no beta"),
    ("model.stack.output", ["model.stack.kind=residual", "model.stack.output=x"], "one stream"),
    ("model.stack.coupling", ["model.stack.kind=residual", "model.stack.coupling=mean"], "one stream"),
    ("model.stack.beta", ["model.stack.coupling=momentum", "model.stack.beta=1.0"], "between 0 and 1"),
    ("model.stack.beta", ["model.stack.coupling=mean", "model.stack.beta=0.9"], "no beta"),
    ("model.stack.index", ["model.stack.index=global"], "counts nothing"),
    ("model.stack.exact", ["model.stack.coupling=mean", "model.stack.exact=true"], "products are not"),
    ("model.stack.exact_bits", ["model.stack.exact_bits=12"], "exact: true"),
    ("model.stack.exact_bits", ["model.stack.kind=residual", "model.stack.exact_bits=12"], "one stream"),
    ("model.rotary_base", ["model.positions=learned", "model.rotary_base=500.0"], "the positions are learned"),
    ("model.stack.output", ["model.stack.coupling=mean", "model.stack.output=sum-minus-input"], "rescale"),
    ("model.stack.output", ["model.stack.input=zeros", "model.stack.output=sum-minus-input"], "twice"),
    ("model.tied", ["model.stack.output=concat"], "512 features .* has 256"),
    ("model.tied", ["model.stack.input=split", "model.stack.output=sum"], "128 features .* has 256"),
    ("model.width", ["model.width=63", "model.positions=none", "model.heads=1", "model.stack.input=split"], "even"),
    ("model.heads", ["model.heads=16", "model.width=264", "model.stack.input=split"], "half of model.width"),
    ("model.stack.coupling", ["model.stack.coupling=momentum", "model.depth=48"], "2.5e.04 times.*0.02.*beta: 0.95.*checkpoint"),
    ("model.stack.coupling", ["model.stack.coupling=affine", "model.depth=48"], "fewer layers.*allow_ill_conditioned"),
    ("model.stack.coupling", ["model.stack.coupling=momentum", "model.depth=24", "precision=bf16-mixed"], "bf16-mixed"),
    ("model.stack.coupling", ["model.stack.coupling=modified-momentum", "model.stack.beta=0.5", "model.depth=12"], "1 of their"),
    ("model.stack.input", ["model.stack.input=zeros-read"], "316.*Use `zeros`"),
    ("model.stack.exact", ["model.stack.exact=true", "precision=fp16-ipu", "device=ipu-emulated"], "24 bits"),
    ("model.stack.coupling", ["model.stack.coupling=momentm"], "did you mean `momentum`"),
    ("model.stack.input", ["model.stack.input=dupl"], "did you mean `duplicate`"),
    ("model.stack.output", ["model.stack.output=gates"], "did you mean `gate`"),
    ("model.vocab", ["model.vocab=256"], "257 pieces"),
    ("model.vocab", ["data.tokenizer.kind=bpe", "model.vocab=4095"], "4096 pieces"),
    ("data.tokenizer.vocab", ["data.tokenizer.vocab=300"], "always has 257"),
    ("data.tokenizer.vocab", ["data.tokenizer.kind=bpe", "data.tokenizer.vocab=256"], "at least 257"),
    ("data.tokenizer.path", ["data.tokenizer.path=x"], "not loaded"),
    ("data.tokenizer.coverage", ["data.tokenizer.coverage=0.5"], "sentencepiece"),
    (
        "data.tokenizer.coverage",
        ["data.tokenizer.kind=sentencepiece", "data.tokenizer.path=x", "data.tokenizer.coverage=0.5"],
        "one is loaded",
    ),
    ("mup.base_width", ["mup.base_width=null"], "needs a base"),
    ("mup.base", ["mup.base={width: 64}"], "not both"),
    ("mup.base.heads", ["mup.base_width=null", "mup.base={width: 64, heads: 5}"], "divide"),
    ("mup.base_width", ["mup.base_width=66", "model.heads=4"], "multiple of 8"),
    ("mup.base_width", ["mup.base_width=32", "model.head_size=64"], "multiple"),
    ("memory.engine", ["model.stack.kind=residual", "memory.engine=invert"], "reversible"),
    ("memory.checkpoint_every", ["memory.checkpoint_every=2"], "engine is auto"),
    ("model.attention", ["device=ipu", "model.attention=fused"], "no fused"),
    ("optimizer.summation", ["optimizer.summation=split"], "only `precision: bf16-pure` reads this"),
    ("optimizer.variance", ["optimizer.variance=stochastic", "precision=bf16-mixed"], "the precision is bf16-mixed"),
    ("optimizer.kind", ["precision=bf16-pure", "optimizer.kind=sgd"], "AdamW only"),
    ("optimizer.variance", ["precision=bf16-pure", "optimizer.variance=bf16", "optimizer.betas=[0.9, 0.999]"], "0.999 a step"),
    ("train.processes", ["precision=bf16-pure", "train.processes=2", "batch.replicas=2"], "in 16 bits"),
    ("precision", ["precision=fp16-ipu"], "the device is cpu"),
    ("data.validation.a", ["data.validation.a=1.0"], "between 0 and 1"),
    ("data.validation.a", ["data.validation.a="], "number"),
    ("data.validation.train", ["data.validation.train=0.1"], "not `train`"),
    ("data.validation", ["data.validation.a=0.5", "data.validation.b=0.5"], "nothing to train on"),
    ("optimizer.momentum", ["optimizer.momentum=0.9"], "adamw. has no momentum"),
    ("optimizer.eps", ["optimizer.kind=sgd", "optimizer.eps=1e-6"], "sgd. has no eps"),
    ("optimizer.nesterov", ["optimizer.kind=sgd", "optimizer.nesterov=true"], "needs a momentum"),
    ("train.steps", ["batch.device_iterations=7"], "multiple.* 1001"),
    ("train.eval_every", ["batch.device_iterations=8", "train.eval_every=12"], "multiple"),
    ("schedule.warmup", ["schedule.warmup=1001"], "1000 updates"),
    ("schedule.warmup", ["schedule.warmup=11", "schedule.steps=10"], "10 updates"),
    ("train.fp16_scale.init", ["train.fp16_scale.minimum=1e6"], "minimum"),
    ("train.processes", ["train.processes=2", "batch.replicas=3"], "evenly"),
    ("train.processes", ["train.processes=2", "batch.replicas=2", "train.strategy=single"], "one process"),
    ("ipu.layers_per_ipu", ["ipu.layers_per_ipu=[3, 2]"], "placed are 5"),
    ("ipu.layers_per_ipu", ["ipu.layers_per_ipu=[7, -1]"], "exactly once"),
    ("ipu.layers_per_ipu", ["ipu.layers_per_ipu=[]"], "placed are 0"),
]


@pytest.mark.parametrize("key, overrides, message", BROKEN)
def test_broken_rule(key, overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config("mup: {base_width: 64}\n", overrides)
    assert caught.value.key == key


@pytest.mark.parametrize(
    "overrides",
    [
        ["mup.parametrization=standard", "mup.base_width=null"],
        ["mup.base_width=null", "mup.base={width: 64}"],
        ["model.stack.kind=residual", "memory.engine=checkpoint", "memory.checkpoint_every=3"],
        ["model.stack.order=aaff", "model.num_hidden_groups=2"],
        ["model.width=63", "model.heads=1", "model.positions=learned", "mup.base_width=63"],
        ["optimizer.kind=sgd", "optimizer.momentum=0.9", "optimizer.nesterov=true"],
        ["batch.device_iterations=4", "batch.replicas=4", "train.processes=2"],
        ["train.eval_every=0", "data.validation={}", "train.clip=null"],
        ["ipu.layers_per_ipu=[0, 3, 3]"],
        ["model.vocab=260"],
        ["data.tokenizer.vocab=257"],
    ],
)
def test_allowed_combinations_load(overrides):
    assert load_config("mup: {base_width: 64}\n", overrides).model.kind == "gpt"


def test_make_config_applies_the_same_rules():
    with pytest.raises(ConfigError, match="divide"):
        make_config(model={"width": 64, "heads": 5}, mup={"base_width": 64})


@pytest.mark.skipif(importlib.util.find_spec("poptorch") is not None, reason="PopTorch is here")
def test_an_ipu_without_poptorch_is_an_environment_problem():
    with pytest.raises(EnvironmentProblem, match="ipu-emulated") as caught:
        require_device(make_config(device="ipu", mup={"base_width": 64}))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("device", ["cpu", "ipu-emulated"])
def test_cpu_and_emulator_need_nothing(device):
    assert require_device(make_config(device=device, mup={"base_width": 64})) is None


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.stack.coupling=momentum", "model.depth=24"],
        ["model.stack.coupling=momentum", "model.depth=48", "model.stack.beta=0.95"],
        ["model.stack.coupling=momentum", "model.depth=48", "memory.engine=checkpoint"],
        ["model.stack.coupling=momentum", "model.depth=48", "memory.engine=store"],
        ["model.stack.coupling=momentum", "model.depth=48", "memory.allow_ill_conditioned=true"],
        ["model.stack.coupling=momentum", "model.depth=48", "device=ipu-emulated"],
        ["model.stack.coupling=mean", "model.depth=192", "precision=bf16-mixed", "mup.depth_rule=none"],
        ["model.depth=192", "precision=bf16-mixed", "mup.depth_rule=none"],
        ["model.stack.input=zeros-read", "memory.allow_ill_conditioned=true"],
        ["model.stack.exact=true", "model.depth=192"],
    ],
)
def test_stacks_that_can_be_undone_or_need_not_be(overrides):
    config = load_config("mup: {base_width: 64}\n", overrides)
    assert config.model.stack.kind == "reversible"
