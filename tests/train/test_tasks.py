"""A task's streams are the data room's own, cut by the configuration, and a noted task is found again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ipu_lean.data import IGNORED, TrainBatches, eval_batches, prepare
from ipu_lean.errors import RunError
from ipu_lean.models import build_model
from ipu_lean.train.commands import with_absolute_paths
from ipu_lean.train.tasks import open_task
from tests.train.helpers import tiny_config, write_corpus

pytestmark = pytest.mark.pod


def test_text_streams_are_those_of_the_prepared_corpus(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    task, prepared = open_task(config), prepare(config)
    assert task.vocab == prepared.vocab == 257 and task.validation_names == ("valid",)
    own = TrainBatches.create(prepared.train, 16, 4, seed=3)
    stream = task.train_batches()
    for _ in range(3):
        assert all(np.array_equal(one, other) for one, other in zip(stream.next(), own.next()))
    other = task.train_batches(rows=7, seed=11).next()
    wanted = TrainBatches.create(prepared.train, 16, 7, seed=11).next()
    assert other[0].shape == (7, 16) and np.array_equal(other[1], wanted[1])
    found = list(task.eval_batches("valid", 3, limit=2))
    assert len(found) == 2
    for one, two in zip(found, eval_batches(prepared.validation["valid"], 16, 3, 2)):
        assert np.array_equal(one[0], two[0]) and np.array_equal(one[1], two[1])


def test_model_vocab_counts_and_a_blank_batch_counts_nothing(tmp_path: Path) -> None:
    task = open_task(tiny_config(tmp_path, model={"vocab": 300}))
    inputs, labels = task.blank(5)
    assert task.vocab == 300
    assert inputs.shape == labels.shape == (5, 16) and inputs.dtype == labels.dtype == np.int32
    assert not inputs.any() and (labels == IGNORED).all()


@pytest.mark.parametrize("head", ["causal-lm", "masked-lm"])
def test_the_model_has_the_rows_that_the_tokenizer_came_to(tmp_path: Path, head: str) -> None:
    """Not those that were asked for: the text is too short for them. A mask has one more."""
    pytest.importorskip("sentencepiece")
    model = {"head": head, "causal": head == "causal-lm"}
    data = {"tokenizer": {"kind": "sentencepiece", "vocab": 2000}}
    config = tiny_config(tmp_path, model=model, data=data, train={"sample": {"tokens": 0}})
    with pytest.warns(UserWarning, match="vocab: 2000.*only"):
        task = open_task(config)
    assert task.tokenizer is not None and task.tokenizer.vocab < 1000
    assert task.vocab == task.tokenizer.vocab + (head == "masked-lm")
    shapes = {name: tuple(value.shape) for name, value in build_model(config, task.vocab).state_dict().items()}
    assert [shape for name, shape in shapes.items() if name.endswith("token.weight")] == [(task.vocab, 16)]


def test_paths_become_absolute_and_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train` as a validation set is the training text, and `kjv` the Bible, even where files of these names lie about."""
    config = tiny_config(tmp_path)
    sets = {"heart": "train", "valid": 0.1, "other": "corpus.txt", "bard": "shakespeare:a.gz"}
    changed = config.data.model_copy(update={"corpus": "kjv", "cache": None, "validation": sets})
    config = config.model_copy(update={"data": changed})
    monkeypatch.chdir(tmp_path)
    for name in ("kjv", "train"):
        (tmp_path / name).mkdir()
    found = with_absolute_paths(config).data
    assert found.corpus == "kjv"
    assert found.validation == {
        "heart": "train", "valid": 0.1, "other": str(tmp_path / "corpus.txt"), "bard": f"shakespeare:{tmp_path}/a.gz",
    }  # fmt: skip


def test_a_noted_task_outlives_its_text_and_notices_another(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    task = open_task(config)
    task.note(tmp_path / "data.json")
    write_corpus(tmp_path / "corpus.txt", seed=1)
    again = open_task(config, record=tmp_path / "data.json")
    assert again.fingerprint() == task.fingerprint()
    assert np.array_equal(again.train_batches().next()[0], task.train_batches().next()[0])
    for path in (tmp_path / "cache").rglob("tokens.u16"):
        path.unlink()
    with pytest.raises(RunError, match="text has changed"):
        open_task(config, record=tmp_path / "data.json")
