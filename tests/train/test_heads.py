"""Masked language models and classifiers through the commands: they learn, go on to the same bits, are measured, and agree on two
devices.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ipu_lean.cli import main
from ipu_lean.config import dump_config, load, load_config
from ipu_lean.data.masked import VALIDATION
from ipu_lean.errors import CheckpointError, ConfigError, RunError
from ipu_lean.ipu.check import check
from ipu_lean.parity import compare, for_device, make_start, record
from ipu_lean.parity.commands import run_parity
from ipu_lean.train import run_eval, run_generate, run_resume, run_train
from ipu_lean.train.compile import run_compile
from ipu_lean.train.memory.worker import batch_of, engine_of
from ipu_lean.train.progress import Reporter
from ipu_lean.train.reuse import open_run
from ipu_lean.train.tasks import open_task
from tests.data.labelled.helpers import draw, labelled_config, write_jsonl
from tests.train.helpers import timeless, tiny_config, write_corpus

pytestmark = pytest.mark.pod
QUIET = Reporter("none")
FINAL = "checkpoints/step-00000012"
MASKED = {"head": "masked-lm", "causal": False, "dropout": 0.1}


def masked_config(folder: Path, **changes: Any) -> Any:
    """A tiny masked LM on generated text."""
    changes = {**changes, "model": {**MASKED, **changes.get("model", {})}}
    sections = {"data": {"mask_share": 0.2}, "train": {"save_every": 4, "sample": {"tokens": 0}}}
    return tiny_config(folder, **{name: {**sections.get(name, {}), **value} if isinstance(value, dict) else value
                                  for name, value in {**sections, **changes}.items()})  # fmt: skip


CONFIGS = {"masked-lm": masked_config, "classifier": labelled_config}
REFORMER = {
    "attention": ["local", "lsh"], "local": {"chunk": 8}, "lsh": {"chunk": 8, "hashes": 2, "redraw_every": 2},
    "positions": "axial", "tied": False, "attention_bias": False, "stack": {"output": "concat"},
}  # fmt: skip


@pytest.fixture(scope="module", params=["masked-lm", "classifier", "masked-lm reformer", "classifier reformer"])
def trained(request: Any, tmp_path_factory: Any) -> Any:
    """(head, folder, summary) of a finished run."""
    head, _, reformer = request.param.partition(" ")
    folder = tmp_path_factory.mktemp(head)
    config = CONFIGS[head](folder, optimizer={"lr": 0.03}, model=REFORMER if reformer else {})
    return head, folder, run_train(load(dump_config(config)), str(folder / "run"), QUIET)


def measured(used: Any, task: Any, rows: int) -> Any:
    """(mean loss, accuracy, count) of the set `valid`, row by row and without our loss; `rows` are the readout's."""
    losses, right = [], 0
    for tokens, labels in task.eval_batches("valid", 1):
        logits = used.model.eval()(torch.from_numpy(tokens)).double().detach().reshape(-1, rows)
        for scores, label in zip(logits, labels.reshape(-1).tolist()):
            if label >= 0:
                losses.append(float(torch.logsumexp(scores, -1) - scores[label]))
                right += int(scores.argmax()) == label
    return sum(losses) / len(losses), right / len(losses), len(losses)


def test_it_learns_and_is_measured(trained: Any) -> None:
    head, folder, summary = trained
    assert summary["status"] == "ok" and "sample" not in summary["artifacts"]
    valid = summary["metrics"]["eval"]["valid"]
    assert valid["loss"] < summary["metrics"]["first_loss"] - 0.05
    assert (folder / "run" / FINAL / "tokenizer").is_dir()
    result = run_eval(str(folder / "run"), report=QUIET)["metrics"]["valid"]
    used = open_run(str(folder / "run"), "best", QUIET)
    task = open_task(used.config, record=used.run.data)
    loss, accuracy, count = measured(used, task, 258 if head == "masked-lm" else 3)
    assert result["loss"] == pytest.approx(loss, rel=1e-5) and result["accuracy"] == pytest.approx(accuracy)
    assert result["tokens"] == count and result["perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)
    assert count == 30 if head == "classifier" else 0.15 < count / len(task.prepared.validation["valid"]) < 0.25


def test_a_run_goes_on_to_the_same_bits_without_its_data(trained: Any, tmp_path: Path) -> None:
    _, folder, _ = trained
    shutil.copytree(folder / "run", tmp_path / "run")
    for step in (8, 12):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
    source = next(path for path in (folder / "corpus.txt", folder / "texts.jsonl") if path.exists())
    source.rename(folder / "away")
    try:
        run_resume(str(tmp_path / "run"), report=QUIET)
    finally:
        (folder / "away").rename(source)
    for name in ("model.safetensors", "optimizer.pt", "trainer.json"):
        assert (tmp_path / "run" / FINAL / name).read_bytes() == (folder / "run" / FINAL / name).read_bytes(), name
    assert timeless(tmp_path / "run" / "metrics.jsonl") == timeless(folder / "run" / "metrics.jsonl")


def test_it_generates_no_text(trained: Any) -> None:
    head, folder, _ = trained
    words = "nothing behind the one to come" if head == "masked-lm" else "classes of texts"
    with pytest.raises(ConfigError, match=words) as caught:
        run_generate(str(folder / "run"), report=QUIET)
    assert caught.value.key == "model.head" and caught.value.value == head


def test_other_data_is_measured(trained: Any, tmp_path: Path) -> None:
    head, folder, _ = trained
    if head == "masked-lm":
        other, short = write_corpus(tmp_path / "other.txt", 40, seed=5), write_corpus(tmp_path / "short.txt", 1)
        wanted = len(other.read_bytes()) + 1  # and the end of the text
    else:
        other, short = write_jsonl(tmp_path / "other.jsonl", draw(50, seed=4)), tmp_path / "none.jsonl"
    metrics = run_eval(str(folder / "run"), data=str(other), report=QUIET)["metrics"]
    assert list(metrics) == ["data"]
    if head == "masked-lm":
        assert 0.15 * wanted < metrics["data"]["tokens"] < 0.25 * wanted
    else:
        assert metrics["data"]["tokens"] == 50 and metrics["data"]["accuracy"] > 0.34
    with pytest.raises(ConfigError) as caught:
        run_eval(str(folder / "run"), data=str(short), report=QUIET)
    assert caught.value.key == "--data"


@pytest.mark.parametrize("head", sorted(CONFIGS))
def test_two_devices_give_the_same_numbers(tmp_path: Path, head: str) -> None:
    """Two IPUs in a pipeline and the CPU."""
    sections = {"batch": {"accumulation": 5, "device_iterations": 2}, "ipu": {"layers_per_ipu": [1, 1]}}
    config = CONFIGS[head](tmp_path, device="ipu-emulated", optimizer={"lr": 0.01}, model={"dropout": 0.0}, **sections)
    result = check(config)
    assert result.verdict == "pass", result.findings
    assert any(("texts" if head == "classifier" else "rows") in line for line in result.batch)
    summary = run_parity(load(dump_config(config)), steps=2, out=str(tmp_path / "parity"))
    assert summary["verdict"] == "pass" and summary["metrics"]["muted"] == []
    assert len(summary["metrics"]["losses"]["candidate"]) == 2
    assert run_compile(load(dump_config(config)))["status"] == "ok"


@pytest.mark.parametrize("head, model", [
    ("masked-lm", {}), ("classifier", {"pooling": "mean", "seq": 16}), ("classifier", {**REFORMER, "seq": 20}),
])  # fmt: skip
def test_a_backward_pass_in_the_step_gives_them_too(tmp_path: Path, head: str, model: Any) -> None:
    """`surrogate` and the CPU; deriving the backward pass is what takes time here, so it is done as rarely as can be."""
    sections = {"batch": {"accumulation": 2, "device_iterations": 2}, "memory": {"ipu_backward": "surrogate"}}
    config = CONFIGS[head](tmp_path, device="ipu-emulated", optimizer={"lr": 0.01}, model={"dropout": 0.0, **model}, **sections)
    start = make_start(config, 2)
    found = compare(*(record(for_device(config, device), start) for device in ("cpu", "ipu-emulated")))
    assert found.verdict == "pass" and found.named("muted") == [], found.diagnosis
    assert sum(row.kind == "loss" for row in found.rows) == 2
    assert "attention" not in model or check(config).verdict == "pass"


def test_an_emulated_ipu_trains_and_measures(tmp_path: Path) -> None:
    for head in CONFIGS:
        changes = {"batch": {"accumulation": 2, "device_iterations": 2}, "train": {"steps": 8}, "model": {"dropout": 0.0}}
        runs = {}
        for device in ("cpu", "ipu-emulated"):
            config = CONFIGS[head](tmp_path, device=device, optimizer={"lr": 0.03}, **changes)
            summary = run_train(load(dump_config(config)), str(tmp_path / f"{head}-{device}"), QUIET)
            runs[device] = summary["metrics"]["eval"]["valid"]
        assert runs["cpu"]["tokens"] == runs["ipu-emulated"]["tokens"]
        assert runs["cpu"]["loss"] == pytest.approx(runs["ipu-emulated"]["loss"], rel=1e-5)


def test_the_batch_size_changes_no_mask(tmp_path: Path) -> None:
    one, two = (open_task(masked_config(tmp_path, batch={"micro": micro})) for micro in (2, 3))
    first, second = one.train_batches(), two.train_batches()
    for a, b in zip(zip(*(np.concatenate(part) for part in zip(*(first.next() for _ in range(3))))),
                    zip(*(np.concatenate(part) for part in zip(*(second.next() for _ in range(2)))))):  # fmt: skip
        assert np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])


def test_validation_masks_are_the_same_in_every_run(tmp_path: Path) -> None:
    tasks = [open_task(masked_config(tmp_path, seed=seed)) for seed in (1, 2)]
    one, two = (next(iter(task.eval_batches("valid", 4))) for task in tasks)
    assert np.array_equal(one[0], two[0]) and np.array_equal(one[1], two[1])
    text = tasks[0].prepared.validation["valid"].read(0, 64).reshape(4, 16)
    assert np.array_equal(one[0], tasks[0].masking.apply(text, np.arange(4), [VALIDATION])[0])
    assert not np.array_equal(tasks[0].train_batches().next()[0], tasks[1].train_batches().next()[0])
    with pytest.raises(ConfigError, match="whole windows of model.seq = 16") as caught:
        open_task(masked_config(tmp_path, data={"validation": {"rest": 0.001}}))
    assert caught.value.key == "data.validation.rest"


def test_changed_texts_are_noticed(tmp_path: Path) -> None:
    config = labelled_config(tmp_path)
    task = open_task(config)
    task.note(tmp_path / "data.json")
    write_jsonl(tmp_path / "texts.jsonl", draw(120, seed=1))
    assert open_task(config, record=tmp_path / "data.json").fingerprint() == task.fingerprint()
    run_train(load(dump_config(labelled_config(tmp_path, train={"steps": 4}))), str(tmp_path / "run"), QUIET)
    shutil.copy(tmp_path / "data.json", tmp_path / "run" / "data.json")
    with pytest.raises(CheckpointError, match="other data"):
        run_resume(str(tmp_path / "run"), ["train.steps=8"], QUIET)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(RunError, match="labelled texts have changed"):
        open_task(config, record=tmp_path / "data.json")


def test_wrong_sizes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for changes, words, key in (
        ({"model": {"classes": 2}}, "the texts are of 3 classes", "model.classes"),
        ({"batch": {"micro": 48}}, "90 texts to train on; one global batch needs 96", "batch"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            run_train(load(dump_config(labelled_config(tmp_path, **changes))), str(tmp_path / "run"), QUIET)
        assert caught.value.key == key and not (tmp_path / "run").exists()
    more = labelled_config(tmp_path, model={"classes": 5}, train={"steps": 4})  # room for classes to come
    run_train(load(dump_config(more)), str(tmp_path / "run"), QUIET)
    assert load_config(tmp_path / "run").model.classes == 5


@pytest.mark.parametrize("head", sorted(CONFIGS))
def test_the_other_commands(tmp_path: Path, head: str, capsys: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(CONFIGS[head](tmp_path)))
    assert main(["explain", str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]["tensors"]
    names = {row["name"] for row in rows}
    assert ("readout.dense.linear.weight" in names) == (head == "classifier") and "embedding.token.weight" in names
    assert main(["prepare", str(path), "--json"]) == 0
    prepared = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    assert prepared["vocab"] == 257
    assert main(["memory", str(path), "--predict", "--json", "--out", str(tmp_path / "memory")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["status"] == "ok"
    config = load_config(path)
    engine = engine_of(config, 258)
    assert np.isfinite(engine.train_step(batch_of(config, 258)).loss)  # what `memory` measures
    assert main(["plan", str(path), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    from ipu_lean.models import build_meta

    assert planned["parameters"] == sum(parameter.numel() for parameter in build_meta(load_config(path)).parameters())


def test_columns_of_other_data_may_have_other_names(trained: Any, tmp_path: Path) -> None:
    head, folder, _ = trained
    if head == "masked-lm":
        pytest.skip("a text has no columns")
    other = tmp_path / "other.csv"
    other.write_text("words,kind\n" + "".join(f"{text},{label}\n" for text, label in draw(50, seed=4)))
    named = ["data.text_key=words", "data.label_key=kind"]
    plain = write_jsonl(tmp_path / "other.jsonl", draw(50, seed=4))
    found = run_eval(str(folder / "run"), named, data=str(other), report=QUIET)["metrics"]["data"]
    assert found == run_eval(str(folder / "run"), data=str(plain), report=QUIET)["metrics"]["data"] and found["tokens"] == 50
    with pytest.raises(ConfigError, match="with --data it may name a column"):
        run_eval(str(folder / "run"), named, report=QUIET)
