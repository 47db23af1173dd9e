"""What a mistake looks like: file, line, key, value, rule, and the nearest right thing."""

import re
from pathlib import Path

import pytest

from ipu_lean.config import load
from ipu_lean.errors import ConfigError

pytestmark = pytest.mark.pod
BASE = "mup: {base_width: 64}\n"

MISTAKES = [
    ("model:\n  widht: 3\n", "text:3: `model.widht`: there is no such key (did you mean `model.width`?)."),
    ("lr: 3e-3\n", "text:2: `lr`: there is no such key (did you mean `optimizer.lr`?)."),
    ("optimizer: {wd: 3}\n", "text:2: `optimizer.wd`: there is no such key (did you mean `optimizer.weight_decay`?)."),
    ("optimizer: {weight_dec: 3}\n", "`optimizer.weight_dec`: there is no such key (did you mean `optimizer.weight_decay`?)."),
    ("optimizer: {momntum: 3}\n", "`optimizer.momntum`: there is no such key (did you mean `optimizer.momentum`?)."),
    ("optimizer: {steps: 3}\n", "`optimizer.steps`: there is no such key (did you mean `train.steps`?)."),
    ("steps: 3\n", "text:2: `steps`: there is no such key (did you mean `train.steps`?)."),
    ("modle: {width: 3}\n", "text:2: `modle`: there is no such key (did you mean `model`?)."),
    ("train:\n  batch: 3\n", "text:3: `train.batch`: there is no such key (did you mean `batch`?)."),
    ("batch: {zzz: 3}\n", "text:2: `batch.zzz`: there is no such key. The keys of `batch` are micro, accumulation, replicas,"),
    ("model: {width: 64.0}\n", "text:2: `model.width: 64.0`: this must be a whole number. Write 64."),
    ("train: {steps: 1e3}\n", "text:2: `train.steps: 1000.0`: this must be a whole number. Write 1000."),
    ("train: {steps: 1.5}\n", "text:2: `train.steps: 1.5`: this must be a whole number."),
    ("train: {steps: .inf}\n", "text:2: `train.steps: inf`: this must be a whole number."),
    ("train: {steps: .nan}\n", "text:2: `train.steps: nan`: this must be a whole number."),
    ("train: {steps: '10'}\n", "text:2: `train.steps: '10'`: this must be a whole number."),
    ("model: {width: 1000000000000}\n", "text:2: `model.width: 1000000000000`: this must be at most 1048576."),
    ("seed: true\n", "text:2: `seed: true`: this must be a whole number."),
    ("seed: -1\n", "text:2: `seed: -1`: this must be at least 0."),
    ("seed: 1" + "0" * 30 + "\n", "this must be less than 4294967296."),
    ("optimizer: {lr: fast}\n", "text:2: `optimizer.lr: 'fast'`: this must be a number."),
    ("optimizer: {lr: 0}\n", "text:2: `optimizer.lr: 0`: this must be greater than 0."),
    ("optimizer: {lr: .nan}\n", "this must be a finite number."),
    ("optimizer: {betas: [0.9, 1.0]}\n", "both must be at least 0 and less than 1."),
    ("optimizer: {betas: [0.9]}\n", "text:2: `optimizer.betas: [0.9]`: these are two numbers, such as [0.9, 0.95]."),
    ("optimizer: {betas: 0.9}\n", "text:2: `optimizer.betas: 0.9`: these are two numbers, such as [0.9, 0.95]."),
    ("train: {keep_best: yes}\n", "text:2: `train.keep_best: 'yes'`: this must be true or false. Write true."),
    ("train: {keep_best: 1}\n", "text:2: `train.keep_best: 1`: this must be true or false."),
    ("model: {norm: rmsnrm}\n", "this must be one of layernorm, rmsnorm (did you mean `rmsnorm`?)."),
    ("device: tpu\n", "text:2: `device: 'tpu'`: this must be one of cpu, gpu, ipu, ipu-emulated"),
    ("precision: bf16\n", "fp32, bf16-mixed, fp16-mixed, bf16-pure (did you mean `bf16-mixed` or `bf16-pure`?)."),
    ("device: ipu\nprecision: fp16\n", "this must be one of fp32, fp16-ipu (did you mean `fp16-ipu`?)."),
    ("device: ipu\nprecision: bf16\n", "this must be one of fp32, fp16-ipu."),
    ("train: {sample: null}\n", "holds keys of its own. For no sample set `train.sample.tokens=0`."),
    ("train: {eval_every: null}\n", "a whole number. To evaluate only at the end set `train.eval_every=0`."),
    ("model: 3\n", "text:2: `model`: this is a section, so it holds keys of its own."),
    ("name: a/b\n", "text:2: `name: 'a/b'`: this must match ^[A-Za-z0-9._-]+$."),
    ("ipu: {layers_per_ipu: [1, x]}\n", "text:2: `ipu.layers_per_ipu: 'x'`: this must be a whole number."),
    ("ipu: {embedding_ipu: 1000000000000}\n", "this must be at most 255."),
    ("ipu: {matmul_proportion: []}\n", "text:2: `ipu.matmul_proportion: []`: this is a share of the memory, greater than 0"),
    ("data: {validation: {a: [1]}}\n", "text:2: `data.validation.a: [1]`: this must be a number."),
    ("data: {validation: 0.1}\n", "text:2: `data.validation: 0.1`: this must be a mapping of names to values."),
    ("data: {corpus: ''}\n", "text:2: `data.corpus: ''`: this may not be empty."),
]


@pytest.mark.parametrize("text, message", MISTAKES)
def test_message(text, message):
    with pytest.raises(ConfigError) as caught:
        load(BASE + text)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_the_first_mistake_of_the_file_is_told_and_the_others_are_named():
    with pytest.raises(ConfigError) as caught:
        load(BASE + "train:\n  stepz: 3\nmodel:\n  width: no\n")
    assert str(caught.value).startswith("text:3: `train.stepz`")
    assert "(also wrong: model.width)" in str(caught.value)


def test_an_unknown_override_is_refused_with_its_neighbour():
    with pytest.raises(ConfigError, match=r"override: `model\.widht`: there is no such key \(did you mean `model\.width`\?\)"):
        load(BASE, ["model.widht=3"])
    with pytest.raises(ConfigError, match=r"`mup\.head_lr`: there is no such key\. The keys of `mup` are parametrization, base_"):
        load(BASE, ["mup.head_lr=3"])


@pytest.mark.parametrize(
    "override, written",
    [
        ("study.expect.kahan.within=1e-2", "study.expect.kahan={within: 1e-2}"),
        ("study.variants.kahan.optimizer.lr=1", "study.variants.kahan={optimizer.lr: 1}"),
        ("sweep.grid.optimizer.weight_decay=[0, 0.1]", "sweep.grid={optimizer.weight_decay: [0, 0.1]}"),
        ("ipu.engine_options.opt.useAutoloader=true", "ipu.engine_options={opt.useAutoloader: true}"),
    ],
)
def test_an_override_below_a_name_in_a_mapping_is_told_how_to_be_written(override, written):
    with pytest.raises(ConfigError) as caught:
        load(BASE, [override])
    error = str(caught.value)
    assert error.startswith(f"override: `{override.partition('=')[0]}`: what stands in `") and f'Write "{written}"' in error


def test_a_mistake_from_an_override_says_so():
    with pytest.raises(ConfigError, match=r"override: `train\.steps: 60\.0`: this must be a whole number\. Write 60\."):
        load(BASE, ["train.steps=6e1"])


def test_fewer_steps_than_the_warmup_name_both_keys():
    with pytest.raises(ConfigError, match=r"schedule's 20 updates \(train\.steps\)\. Add `schedule\.warmup=0`, or .* at most 20"):
        load(BASE + "schedule: {warmup: 100}\n", ["train.steps=20"])


def test_every_page_that_a_message_names_exists():
    root = Path(__file__).resolve().parents[2]
    sources = "".join(file.read_text(encoding="utf-8") for file in (root / "ipu_lean").rglob("*.py"))
    pages = sorted(set(re.findall(r"docs/[\w/-]+\.md", sources)))
    assert pages and [page for page in pages if not (root / page).is_file()] == []


def test_a_mistake_in_the_extended_file_names_that_file(tmp_path):
    (tmp_path / "a.yaml").write_text("\nmodel:\n  heads: 7\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\nmup: {base_width: 64}\n")
    with pytest.raises(ConfigError, match=r"extends .*a\.yaml:3: `model\.heads: 7`: this must divide model\.width"):
        load(tmp_path / "b.yaml")


def test_values_are_shown_as_yaml_has_them():
    shown = [str(ConfigError("no", key="k", value=value)) for value in (True, False, [1, True, None, "x"], (0.5, 2), "true", 0)]
    assert shown == [
        f"`k: {text}`: no." for text in ("true", "false", "[1, true, null, 'x']", "[0.5, 2]", "'true'", "0")
    ]
