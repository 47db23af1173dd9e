"""`train`, `eval`, `generate` from the command line to the files, interrupts and failures included."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from ipu_lean.config import config_hash, load_config
from ipu_lean.errors import ConfigError
from ipu_lean.train import run_generate
from ipu_lean.train.checkpoint import CheckpointStore
from tests.train.helpers import timeless, write_corpus, write_yaml

pytestmark = pytest.mark.pod
SLOW = (
    "import time\nfrom ipu_lean.train.engines.torch_engine import TorchEngine\nold = TorchEngine.train_step\n"
    "def slow(self, batch):\n    time.sleep(0.03)\n    return old(self, batch)\nTorchEngine.train_step = slow\n"
)


@pytest.fixture(scope="module")
def done(zygote: Any, tmp_path_factory: Any) -> Any:
    """(run directory, how `train` ended)."""
    folder = tmp_path_factory.mktemp("done")
    config = write_yaml(
        folder, data={"validation": {"valid": 0.1, "tail": 0.05}}, train={"sample": {"tokens": 8, "prompt": "the lean"}}
    )
    ended = zygote.run(["train", config.name, "--out", "run", "--json"], cwd=folder)
    assert ended.code == 0, ended.err
    return folder / "run", ended


def test_run_directory_is_complete(done: Any) -> None:
    run, ended = done
    names = "checkpoints config.yaml data.json loss.png metrics.csv metrics.jsonl sample.txt summary.json"
    assert " ".join(sorted(path.name for path in run.iterdir() if not path.name.startswith("."))) == names
    config = load_config(run / "config.yaml")
    assert config.data.corpus == str(run.parent / "corpus.txt")
    assert ended.summary == json.loads((run / "summary.json").read_text())
    summary = ended.summary
    assert (summary["status"], summary["exit_code"], summary["steps"], summary["verdict"]) == ("ok", 0, 12, None)
    assert summary["tokens"] == 12 * 4 * 16 and summary["config_hash"] == config_hash(config)
    assert summary["metrics"]["loss"] < summary["metrics"]["first_loss"]
    for path in summary["artifacts"].values():
        assert Path(path).exists()
    assert (run / "sample.txt").read_text(encoding="utf-8").startswith("the lean")


def test_metrics_are_where_they_should_be(done: Any) -> None:
    run, _ = done
    records = timeless(run / "metrics.jsonl")
    assert [one["step"] for one in records if one["split"] == "train"] == [1, 2, 4, 6, 8, 10, 12]
    assert (
        [one["step"] for one in records if one["split"] == "valid"]
        == [4, 8, 12]
        == [one["step"] for one in records if one["split"] == "tail"]
    )
    assert all(one["tokens"] == one["step"] * 64 for one in records if one["split"] == "train")
    losses = [one["loss"] for one in records if one["split"] == "valid"]
    assert losses[-1] < losses[0]
    # The first loss is that of a model that knows nothing: ln(257), up to what an embedding of 0.1 adds.
    assert abs(records[0]["loss"] - 5.549) < 0.4


def test_checkpoints_kept_are_the_last_two_and_the_best(done: Any) -> None:
    run, ended = done
    store = CheckpointStore(run / "checkpoints")
    best = ended.summary["metrics"]["best"]
    assert store.steps() == sorted({9, 12, best["step"]}) and store.find("best").name == f"step-{best['step']:08d}"
    assert best["set"] == "valid"


def test_banner_and_lines(done: Any) -> None:
    _, ended = done
    for words in (
        "model.width=16",
        "mup.base_width=8",
        "torch ",
        "parameters (tied ones counted once)",
        "batch: 2 micro x 2 accumulation x 1 replicas = 4 rows x 16 tokens = 64 per update",
        "schedule: cosine, 2 warm-up, 12 updates",
    ):
        assert words in ended.out, words
    assert re.search(
        r"^step 12/12  loss \d\.\d{4}  lr \d\.\d\de-\d\d  tokens/s \d+  data-wait \d+\.\d%  grad \d\.\d\d$", ended.out, re.M
    )
    assert re.search(r"^eval 12/12  tail  loss \d\.\d{4}  accuracy 0\.\d{4}  perplexity \d+\.\d\d  tokens \d+$", ended.out, re.M)
    assert ended.err == "", "nothing is left of Lightning's chatter"


def test_eval_repeats_the_last_evaluation(zygote: Any, done: Any) -> None:
    run, trained = done
    ended = zygote.run(["eval", run, "--checkpoint", "last", "--json"])
    assert ended.code == 0, ended.err
    for name in ("valid", "tail"):
        expected = {key: value for key, value in trained.summary["metrics"]["eval"][name].items() if key != "step"}
        assert ended.summary["metrics"][name] == expected
    by_step = zygote.run(["eval", run, "--checkpoint", "9", "--json", "batch.micro=5", "train.eval_batches=1"])
    assert by_step.code == 0 and by_step.summary["steps"] == 9
    assert by_step.summary["metrics"]["valid"]["tokens"] == 5 * 2 * 16
    assert zygote.run(["eval", run, "--checkpoint", "5"]).code == 2
    assert json.loads((run / "summary.json").read_text())["command"] == "train"


def test_eval_on_another_corpus(zygote: Any, done: Any, tmp_path: Path) -> None:
    from ipu_lean.train import Reporter, run_eval

    run, _ = done
    other = write_corpus(tmp_path / "other.txt", 200, seed=9)
    summary = run_eval(str(run), data=str(other), report=Reporter("none"))
    # One document: its bytes and an end-of-text token, of which all but the first are labels.
    assert summary["metrics"]["data"]["tokens"] == len(other.read_bytes())


@pytest.mark.parametrize("override", ["model.heads=4", "model.activation=relu", "optimizer.lr=4", "seed=5", "data.limit=500"])
def test_eval_measures_the_model_that_was_trained(zygote: Any, done: Any, override: str) -> None:
    run, _ = done
    ended = zygote.run(["eval", run, override])
    assert ended.code == 2 and override.split("=")[0] in ended.err and "another model or text" in ended.err, ended.err


def test_eval_of_a_short_text_and_of_an_absent_device(zygote: Any, done: Any, tmp_path: Path) -> None:
    run, _ = done
    (tmp_path / "short.txt").write_text("lean")
    ended = zygote.run(["eval", run, "--data", tmp_path / "short.txt", "--json"])
    assert ended.code == 0 and ended.summary["metrics"]["data"]["tokens"] == 4, ended.err  # "lean" and its end
    ended = zygote.run(["eval", run, "device=gpu"])
    import torch

    assert torch.cuda.is_available() or (ended.code == 3 and "was trained on gpu" not in ended.err), ended.err


@pytest.mark.parametrize("temperature", ["1e-320", "1e-40"])
def test_a_tiny_temperature_is_greedy(zygote: Any, done: Any, temperature: str) -> None:
    run, _ = done
    texts = []
    for value in ("0", temperature):
        ended = zygote.run(["generate", run, "--prompt", "the", "--tokens", "9", "--temperature", value, "--json"])
        assert ended.code == 0, ended.err
        texts.append(ended.summary["text"])
    assert texts[0] == texts[1]


def test_a_prompt_that_is_no_text(done: Any) -> None:
    run, _ = done
    with pytest.raises(ConfigError, match="UTF-8"):
        run_generate(str(run), "ab\udcff")


def test_generate(zygote: Any, done: Any) -> None:
    run, _ = done
    first = zygote.run(["generate", run, "--prompt", "the lean", "--tokens", "30", "--temperature", "0", "--json"])
    assert first.code == 0, first.err
    assert first.summary["text"].startswith("the lean") and first.summary["text"] in first.out
    assert (
        zygote.run(["generate", run, "--prompt", "-", "--tokens", "30", "--temperature", "0"], stdin="the lean").out.strip()
        in first.out
    )
    sampled = [zygote.run(["generate", run, "--seed", seed, "--tokens", "30"]).out for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_generate_in_batches_from_python(done: Any) -> None:
    from ipu_lean.train import Reporter, run_generate

    run, _ = done
    summary = run_generate(str(run), prompts=["the", "it"], samples=2, tokens=5, report=Reporter("none"))
    assert len(summary["texts"]) == 4 and summary["texts"][0] != summary["texts"][1]
    assert all(text.startswith(prompt) for text, prompt in zip(summary["texts"], ("the", "the", "it", "it")))
    assert summary["tokens"] <= 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(zygote: Any, tmp_path: Path, number: int) -> None:
    config = write_yaml(tmp_path, train={"save_every": 100, "eval_every": 0})
    ended = zygote.run(["train", config, "--out", tmp_path / "run"], prelude=SLOW, signals=[(0.05, number)])
    assert ended.code == 130, ended.err
    stopped = re.search(r"stopped at step (\d+) of 12 and saved; go on with: ipu-lean resume (\S+)", ended.err)
    assert stopped and "Traceback" not in ended.err
    run, step = Path(stopped.group(2)), int(stopped.group(1))
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["steps"]) == ("interrupted", 130, step) and 1 <= step < 12
    assert CheckpointStore(run / "checkpoints").steps() == [step]
    assert zygote.run(["resume", run]).code == 0
    assert zygote.run(["train", config, "--out", tmp_path / "straight"]).code == 0
    last = "checkpoints/step-00000012/model.safetensors"
    assert (run / last).read_bytes() == (tmp_path / "straight" / last).read_bytes()
    assert timeless(run / "metrics.jsonl") == timeless(tmp_path / "straight" / "metrics.jsonl")


@pytest.mark.parametrize("number, there, foreign", [
    (signal.SIGINT, False, False), (signal.SIGINT, True, False), (signal.SIGINT, False, True), (signal.SIGTERM, False, False),
])  # fmt: skip
def test_ctrl_c_before_the_first_step_leaves_the_name_free(
    zygote: Any, tmp_path: Path, number: int, there: bool, foreign: bool
) -> None:
    """An empty directory that was there before stays, and so does a run in which somebody else has put something meanwhile, and
    one that a scheduler stopped, which `resume` then begins."""
    run = tmp_path / "run"
    if there:
        run.mkdir()
    stopping = (
        "import os\nfrom ipu_lean.train.session import Session\nspeak = Session._speak\n"
        "def stopped(self, source):\n    speak(self, source)\n"
        + ("    (self.run.path / 'notes.txt').write_text('mine')\n" if foreign else "")
        + f"    os.kill(os.getpid(), {int(number)})\nSession._speak = stopped\n"
    )
    config = write_yaml(tmp_path, train={"steps": 3})
    ended = zygote.run(["train", config, "--out", run], prelude=stopping)
    assert ended.code == 130 and "stopped before the first step" in ended.err and "Traceback" not in ended.err, ended.err
    if foreign or number == signal.SIGTERM:
        assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
        assert zygote.run(["resume", run]).code == 0 and (not foreign or (run / "notes.txt").read_text() == "mine")
    else:
        assert run.exists() == there and not (there and list(run.iterdir())), list(run.iterdir())
        assert zygote.run(["train", config, "--out", run]).code == 0


def test_second_ctrl_c_ends_at_once(zygote: Any, tmp_path: Path) -> None:
    config = write_yaml(tmp_path)
    slow = SLOW.replace("0.03", "0.5")
    ended = zygote.run(
        ["train", config, "--out", tmp_path / "run"], prelude=slow, signals=[(0.1, signal.SIGINT), (0.2, signal.SIGINT)]
    )
    assert ended.code == 130 and "stopped at once" in ended.err and "and saved" not in ended.err


@pytest.mark.parametrize("when", ["before", "after"])
def test_non_finite_loss_names_the_step_and_the_checkpoint(zygote: Any, tmp_path: Path, when: str) -> None:
    bad = 2 if when == "before" else 8
    prelude = (
        "from ipu_lean.models import TrainStep\nold = TrainStep.forward\ncount = [0]\n"
        "def forward(self, *batch):\n    count[0] += self.training\n    loss, sums = old(self, *batch)\n"
        f"    return (loss * float('nan') if count[0] > 2 * {bad - 1} and self.training else loss), sums\n"
        "TrainStep.forward = forward\n"
    )
    config = write_yaml(tmp_path)
    ended = zygote.run(["train", config, "--out", tmp_path / "run", "--json"], prelude=prelude)
    assert ended.code == 1 and f"the loss is nan at step {bad}." in ended.err and "Traceback" not in ended.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["steps"]) == ("failed", 1, bad - 1)
    if when == "before":
        assert "there is no checkpoint yet" in ended.err
    else:
        assert "the last good checkpoint is " in ended.err and "step-00000006" in ended.err
        assert zygote.run(["eval", tmp_path / "run", "--checkpoint", "last"]).code == 0


def test_full_disk_keeps_the_last_checkpoint(zygote: Any, tmp_path: Path) -> None:
    config = write_yaml(tmp_path)
    prelude = (
        "import errno\nfrom ipu_lean.train import snapshot\nold = snapshot.save_file\n"
        "def full(tensors, name, **options):\n"
        "    if 'step-00000006' in name: raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "    return old(tensors, name, **options)\nsnapshot.save_file = full\n"
    )
    ended = zygote.run(["train", config, "--out", tmp_path / "run"], prelude=prelude)
    assert ended.code == 1 and "the disk is full" in ended.err and "step-00000006 was not written" in ended.err
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.steps() == [3, 4] and not list(store.root.glob(".*"))
    assert zygote.run(["resume", tmp_path / "run"]).code == 0


def test_a_file_size_limit_is_a_full_disk(zygote: Any, tmp_path: Path) -> None:
    config = write_yaml(tmp_path, model={"width": 64}, train={"steps": 3})
    assert zygote.run(["prepare", config]).code == 0
    ended = zygote.run(["train", config, "--out", tmp_path / "run"], file_limit=60000)
    assert ended.code == 1 and "the disk is full" in ended.err and "Traceback" not in ended.err, ended.err
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == []


def test_mistakes_leave_no_directory_behind(zygote: Any, tmp_path: Path) -> None:
    config = write_yaml(tmp_path)
    for override, code in (
        ("data.corpus=/nowhere/at/all.txt", 2),
        ("model.seq=100000", 2),
        ("device=ipu", 3),
        ("batch.micro=5000", 2),
    ):
        ended = zygote.run(["train", config, override, "--out", tmp_path / "run"])
        assert ended.code == code and not (tmp_path / "run").exists() and "Traceback" not in ended.err, ended.err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    ended = zygote.run(["train", config, "--out", tmp_path / "run"])
    assert ended.code == 2 and "exists and is not empty" in ended.err
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_no_validation_sets(zygote: Any, tmp_path: Path) -> None:
    # Overrides cannot empty a mapping, so the file says it.
    config = write_yaml(tmp_path)
    parts = json.loads(config.read_text())
    parts["data"]["validation"] = {}
    config.write_text(json.dumps(parts))
    ended = zygote.run(["train", config, "--out", tmp_path / "run", "--json"])
    assert ended.code == 0, ended.err
    assert ended.summary["metrics"]["best"] is None and CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [9, 12]
    ended = zygote.run(["eval", tmp_path / "run"])
    assert ended.code == 2 and "no validation set" in ended.err
    assert "no best checkpoint" in zygote.run(["generate", tmp_path / "run", "--tokens", "2"]).err
