"""Evaluation counts every token once, whatever the batch, and equals a plain loop over the text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ipu_lean.config import Config
from ipu_lean.data import Prepared, TokenFile
from ipu_lean.data.tokenizers import ByteTokenizer
from ipu_lean.train.engines import TorchEngine
from ipu_lean.train.evaluate import evaluate_all, evaluate_set, summarise
from ipu_lean.train.tasks import TextTask
from ipu_lean.train.world import World
from tests.train.helpers import tiny_config
from tests.train.toys import ToyModel, ToyStep

pytestmark = pytest.mark.pod


def token_file(path: Path, count: int) -> TokenFile:
    np.random.RandomState(count).randint(0, 11, count).astype("<u2").tofile(path)
    return TokenFile(path)


def config_of(folder: Path, micro: int, seq: int, **train: Any) -> Config:
    return tiny_config(folder, batch={"micro": micro, "accumulation": 2}, model={"seq": seq}, train=train)


def task_of(config: Config, **sets: TokenFile) -> TextTask:
    return TextTask(config, Prepared(Path("nowhere"), {}, ByteTokenizer(), next(iter(sets.values())), sets))


@pytest.mark.parametrize("count", [2, 17, 64, 161, 250])
@pytest.mark.parametrize("micro, seq", [(1, 16), (3, 8), (5, 16)])
def test_equals_a_plain_loop_over_the_text(tmp_path: Path, count: int, micro: int, seq: int) -> None:
    tokens = token_file(tmp_path / "t.u16", count)
    engine = TorchEngine(ToyStep(ToyModel()), None, None, config_of(tmp_path, micro, seq))
    found = evaluate_set(engine, task_of(engine.config, valid=tokens), "valid", World())
    text = torch.from_numpy(tokens.read(0, count)).long()
    with torch.no_grad():
        logits = ToyModel()(text[:-1]).double()  # this model looks at one token at a time, so windows do not matter
    expected = torch.nn.functional.cross_entropy(logits, text[1:])
    assert found["tokens"] == count - 1
    assert found["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(float(expected)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((logits.argmax(-1) == text[1:]).double().mean()))


def test_limit_is_in_global_batches(tmp_path: Path) -> None:
    tokens = token_file(tmp_path / "t.u16", 1000)
    config = config_of(tmp_path, 3, 8, eval_batches=2)
    engine = TorchEngine(ToyStep(ToyModel()), None, None, config)
    found = evaluate_all(engine, task_of(config, one=tokens, two=tokens), World())
    assert list(found) == ["one", "two"] and found["one"] == found["two"] and found["one"]["tokens"] == 2 * 6 * 8


@pytest.mark.parametrize("size", [2, 3])
def test_processes_share_the_batches_and_make_equally_many_calls(tmp_path: Path, size: int) -> None:
    tokens = token_file(tmp_path / "t.u16", 200)
    config = config_of(tmp_path, 2, 8)
    engine = TorchEngine(ToyStep(ToyModel()), None, None, config)
    totals, calls = np.zeros(3), []

    class Alone(World):
        """One of several processes, whose sums are added up here."""

        def sum(self, values: Any) -> Any:
            totals[:] += values
            return list(values)

    original = engine.eval_step
    for rank in range(size):
        calls.append(0)

        def counted(batch: Any) -> Any:
            calls[-1] += 1
            return original(batch)

        engine.eval_step = counted
        evaluate_set(engine, task_of(config, valid=tokens), "valid", Alone(rank, size))
    engine.eval_step = original
    whole = evaluate_set(engine, task_of(config, valid=tokens), "valid", World())
    assert len(set(calls)) == 1
    assert totals[2] == whole["tokens"] and totals[0] / totals[2] == pytest.approx(whole["loss"], rel=1e-9)


def test_a_hopeless_model_has_infinite_perplexity() -> None:
    assert summarise(8000.0, 0, 10)["perplexity"] == math.inf
    assert math.isnan(summarise(0.0, 0, 0)["loss"])
