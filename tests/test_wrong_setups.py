"""Mistakes that people make, each with the exit code it must have: 2 for the configuration and the arguments, 3 for the machine,
1 for a run that could not go on. Always one paragraph that names what is wrong, never a traceback.

    {run}      a finished run        {config}   a good configuration        {tmp}   an empty folder of the row's own
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

import pytest

from ipu_lean.train.checkpoint import CheckpointStore
from ipu_lean.train.files import sha256
from tests.train.helpers import sections, write_yaml
from tests.train.zygote import Zygote

pytestmark = pytest.mark.pod
ROOT = Path(__file__).resolve().parents[1]


class Row(NamedTuple):
    """One mistake."""

    name: str
    words: str
    code: int
    says: str
    arrange: Optional[Callable[[Path, Path], Any]] = None
    prelude: str = ""
    file_limit: Optional[int] = None


def override(name: str, text: str, says: str, code: int = 2, **more: Any) -> Row:
    """`train` with one override."""
    return Row(name, f"train {{config}} --out {{tmp}}/out {text}", code, says, **more)


def missing(package: str) -> str:
    """Python that hides a package."""
    return f"import sys\nsys.modules[{package!r}] = None\n"


# -- arrangements ------------------------------------------------------------------------------------------------------------
def file(name: str, text: str) -> Callable[[Path, Path], None]:
    """A file in the row's folder."""

    def arrange(tmp: Path, run: Path) -> None:
        (tmp / name).write_text(text, encoding="utf-8")

    return arrange


def changed(**changes: Any) -> Callable[[Path, Path], None]:
    """tiny.yaml in the row's folder, with other values."""

    def arrange(tmp: Path, run: Path) -> None:
        shutil.copy(run.parent / "corpus.txt", tmp)
        (tmp / "tiny.yaml").write_text(json.dumps(sections(tmp, **changes)))

    return arrange


def copy_of(act: Callable[[Path], Any]) -> Callable[[Path, Path], None]:
    """A copy of the run, and something done to it."""

    def arrange(tmp: Path, run: Path) -> None:
        shutil.copytree(run, tmp / "run")
        act(tmp / "run")

    return arrange


def newest(run: Path) -> Path:
    store = CheckpointStore(run / "checkpoints")
    return store.path(store.steps()[-1])


def flip(run: Path) -> None:
    """One bit of the weights."""
    path = newest(run) / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def forge(name: str, content: bytes) -> Callable[[Path], None]:
    """Other content under the right checksum."""

    def act(run: Path) -> None:
        path, manifest = newest(run) / name, newest(run) / "manifest.json"
        path.write_bytes(content)
        parts = json.loads(manifest.read_text())
        parts["files"][name] = {"sha256": sha256(path), "bytes": len(content)}
        manifest.write_text(json.dumps(parts))

    return act


def other_vocabulary(run: Path) -> None:
    """A checkpoint that says it knows fewer tokens than its tokenizer makes."""
    trainer = json.loads((newest(run) / "trainer.json").read_text())
    forge("trainer.json", json.dumps({**trainer, "vocab": 200}).encode())(run)


def hold_lock(tmp: Path, run: Path) -> Any:
    """Another process (this one) trains in the run directory."""
    import fcntl

    handle = open(run / ".lock", "w")  # noqa: SIM115 - held while the row runs
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def edit(old: str, new: str) -> Callable[[Path], None]:
    """Change the run's config.yaml by hand."""

    def act(run: Path) -> None:
        text = (run / "config.yaml").read_text()
        assert old in text
        (run / "config.yaml").write_text(text.replace(old, new, 1))

    return act


BAD_LOSS = (
    "from ipu_lean.models import TrainStep\nold = TrainStep.forward\n"
    "TrainStep.forward = lambda *a: (old(*a)[0] * float('nan'), old(*a)[1])\n"
)
NO_GPU = "import torch\ntorch.cuda.is_available = lambda: False\n"
NO_ROOM = (
    "import errno\nfrom ipu_lean.train import loggers\n"
    "def write(self, record): raise_full()\n"
    "def raise_full():\n"
    "    with loggers.disk_guard('a line was not written'): raise OSError(errno.ENOSPC, 'No space left on device')\n"
    "loggers.MetricsLog.write = write\n"
)

ROWS: List[Row] = [
    # -- the command line
    Row("no command", "", 2, "COMMAND"),
    Row("mistyped command", "trian {config}", 2, "did you mean `train`"),
    Row("unknown flag", "train {config} --fast", 2, "--fast"),
    Row("no file", "train {tmp}/none.yaml", 2, "no such file"),
    Row("a folder that is no run", "train {tmp}", 2, "no such file"),
    Row("override without a value", "train {config} train.steps", 2, "key.path=value"),
    # -- the YAML
    Row("not YAML", "train {tmp}/a.yaml", 2, "not valid YAML", file("a.yaml", "seed: 1\nmodel: {width: 16\n")),
    Row("a list", "train {tmp}/a.yaml", 2, "a.yaml", file("a.yaml", "- seed\n- 1\n")),
    Row("key twice", "train {tmp}/a.yaml", 2, "a.yaml:2", file("a.yaml", "seed: 1\nseed: 2\n")),
    Row("mistyped key in a file", "train {tmp}/a.yaml", 2, "did you mean `model.width`", file("a.yaml", "model:\n  widht: 16\n")),
    Row("extends nothing", "train {tmp}/a.yaml", 2, "extends", file("a.yaml", "extends: other.yaml\n")),
    Row("an empty file", "train {tmp}/a.yaml", 2, "mup.base_width", file("a.yaml", "")),
    # -- single values
    override("mistyped key", "model.dept=4", "did you mean `model.depth`"),
    override("wrong type", "train.steps=many", "train.steps"),
    override("a fraction of a step", "train.steps=1.5", "train.steps"),
    override("out of range", "model.depth=0", "model.depth"),
    override("dropout above one", "model.dropout=1.5", "model.dropout"),
    override("unknown choice", "optimizer.kind=adan", "optimizer.kind"),
    override("not a truth", "logging.csv=perhaps", "logging.csv"),
    # -- values that do not go together
    override("heads do not divide width", "model.heads=3", "model.heads"),
    override("heads and head_size", "model.head_size=8", "model.head_size"),
    override("odd heads with rotary", "model.heads=16", "rotary"),
    override("warm-up longer than the run", "schedule.warmup=50", "schedule.warmup"),
    override("steps not a multiple of device iterations", "batch.device_iterations=5", "train.steps"),
    override("processes do not divide replicas", "train.processes=3", "train.processes"),
    override("single with two processes", "train.processes=2 train.strategy=single batch.replicas=2", "single"),
    override("momentum with AdamW", "optimizer.momentum=0.9", "optimizer.momentum"),
    override("a loss scale below its minimum", "train.fp16_scale.init=0.5", "train.fp16_scale.init"),
    override("inverting a residual stack", "model.stack.kind=residual memory.engine=invert", "memory.engine"),
    override("both kinds of muP base", "mup.base={config}", "mup.base"),
    Row("no muP base", "train {tmp}/tiny.yaml", 2, "mup.base_width", changed(mup={"base_width": None})),
    override("base file missing", "mup.base_width=null mup.base=none.yaml", "mup.base"),
    # -- data
    override("corpus missing", "data.corpus={tmp}/none.txt", "data.corpus"),
    override("corpus empty", "data.corpus={tmp}/empty.txt", "data.corpus", arrange=file("empty.txt", "")),
    override("no file matches", "data.corpus={tmp}/*.text", "data.corpus"),
    override("sequence longer than the data", "model.seq=50000", "model.seq"),
    override("batch larger than the data", "batch.micro=4000", "batch"),
    override("held-out share above one", "data.validation.valid=1.5", "data.validation"),
    override("held-out share too small", "data.validation.valid=0.0000001", "data.validation.valid"),
    override("fewer rows than the tokenizer has pieces", "model.vocab=100", "model.vocab"),
    override("tokenizer missing", "data.tokenizer.kind=bpe data.tokenizer.path={tmp}/none", "data.tokenizer"),
    override("not a tokenizer", "data.tokenizer.kind=bpe data.tokenizer.path={tmp}", "tokenizer", arrange=file("x.txt", "x")),
    # -- run directories and checkpoints
    Row("output directory in use", "train {config} --out {run}", 2, "not empty"),
    Row("output below a file", "train {config} --out {config}/below", 2, "--out"),
    Row("resume what is no run", "resume {tmp}", 2, "config.yaml"),
    Row("resume nothing", "resume {tmp}/none", 2, "no run directory"),
    Row("resume with another rate", "resume {run} optimizer.lr=1e-3", 2, "optimizer.lr"),
    Row("resume with fewer steps", "resume {run} train.steps=1", 2, "train.steps"),
    Row("resume an edited run", "resume {tmp}/run", 2, "edited", copy_of(edit("width: 16", "width: 32"))),
    Row("resume a run in use", "resume {run}", 1, "another process", hold_lock),
    Row("no such checkpoint", "eval {run} --checkpoint 999", 2, "Steps with a checkpoint: 2"),
    Row("not a checkpoint's name", "eval {run} --checkpoint newest", 2, "Steps with a checkpoint: 2"),
    Row("a damaged checkpoint", "eval {tmp}/run --checkpoint 2", 1, "differs from its checksum", copy_of(flip)),
    Row(
        "unreadable weights", "eval {tmp}/run --checkpoint 2", 1, "cannot be read", copy_of(forge("model.safetensors", b"x" * 99))
    ),
    Row("unreadable optimizer", "resume {tmp}/run", 1, "optimizer.pt", copy_of(forge("optimizer.pt", b"x" * 99))),
    Row("weights of another width", "eval {tmp}/run --checkpoint 2", 1, "does not fit", copy_of(edit("width: 16", "width: 32"))),
    Row("wrong vocabulary", "generate {tmp}/run --checkpoint 2", 1, "do not belong together", copy_of(other_vocabulary)),
    Row(
        "no checkpoint at all",
        "generate {tmp}/run",
        1,
        "no whole checkpoint",
        copy_of(lambda run: shutil.rmtree(run / "checkpoints")),
    ),
    Row("evaluating on nothing", "eval {run} --data {tmp}/none.txt", 2, "none.txt"),
    Row("negative temperature", "generate {run} --temperature -1", 2, "--temperature"),
    Row("probability above one", "generate {run} --top-p 1.5", 2, "--top-p"),
    Row("no samples", "generate {run} --samples 0", 2, "--samples"),
    # -- the machine
    override("no GPU", "device=gpu", "device: cpu", 3, prelude=NO_GPU),
    override("no IPU", "device=ipu", "PopTorch", 3),
    override(
        "no TensorBoard", "logging.tensorboard=true", "pip install tensorboard", 3, prelude=missing("torch.utils.tensorboard")
    ),
    override("no W&B", "logging.wandb=true", "pip install wandb", 3, prelude=missing("wandb")),
    override("no SentencePiece", "data.tokenizer.kind=sentencepiece", "sentencepiece", 3, prelude=missing("sentencepiece")),
    override("no datasets", "data.corpus=hf:some/thing", "datasets", 3, prelude=missing("datasets")),
    override("a cache that cannot be", "data.cache=/dev/null/cache", "data.cache", 3),
    # -- runs that fail
    override("loss is not a number", "train.steps=2", "the loss is nan at step 1", 1, prelude=BAD_LOSS),
    override("disk full at a checkpoint", "model.width=64", "the disk is full", 1, file_limit=60000),
    override("disk full at a metric", "train.steps=2", "the disk is full", 1, prelude=NO_ROOM),
]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as server:
        yield server


@pytest.fixture(scope="module")
def place(zygote: Zygote, tmp_path_factory: Any) -> Dict[str, Path]:
    """A good configuration and a finished run of it; wider models find their tokens prepared."""
    folder = tmp_path_factory.mktemp("good")
    config = write_yaml(folder, schedule={"warmup": 0}, train={"steps": 2, "save_every": 2, "eval_every": 0})
    ended = zygote.run(["train", config, "--out", folder / "run"])
    assert ended.code == 0, ended.err
    return {"config": config, "run": folder / "run"}


def assert_explained(code: int, err: str, row: Row) -> None:
    """The right code; one paragraph, with what matters in it; no traceback."""
    assert code == row.code, err
    assert "Traceback" not in err and row.says in err, err
    lines = [line for line in err.splitlines() if line.strip() and not line.startswith("warning:")]
    assert len(lines) == 1 and lines[0].startswith("ipu-lean: error:"), err
    assert len(lines[0]) < 1200


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_mistake(zygote: Zygote, place: Dict[str, Path], tmp_path: Path, row: Row) -> None:
    held = row.arrange(tmp_path, place["run"]) if row.arrange else None
    words = [word.format(tmp=tmp_path, **place) for word in row.words.split()]
    ended = zygote.run(words, cwd=tmp_path, prelude=row.prelude, file_limit=row.file_limit)
    if held is not None:
        held.close()
    assert_explained(ended.code, ended.err, row)
    if row.code == 2:
        assert not (tmp_path / "out").exists() and not (tmp_path / "runs").exists(), "a mistake leaves nothing behind"


def test_there_are_forty_of_them() -> None:
    assert len(ROWS) >= 40 and len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("name", ["mistyped key", "corpus empty", "no IPU"])
def test_true_processes_say_the_same(place: Dict[str, Path], tmp_path: Path, name: str) -> None:
    row = next(row for row in ROWS if row.name == name)
    if row.arrange:
        row.arrange(tmp_path, place["run"])
    words = [word.format(tmp=tmp_path, **place) for word in row.words.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "ipu_lean", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert_explained(ended.returncode, ended.stderr, row)


def test_json_is_the_last_line_even_then(zygote: Zygote, place: Dict[str, Path]) -> None:
    ended = zygote.run(["train", place["config"], "model.heads=3", "--json"])
    assert ended.summary["exit_code"] == 2 and ended.summary["status"] == "failed" and "model.heads" in ended.summary["error"]


@pytest.fixture()
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 KB, where the system lets us mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_is_really_full(zygote: Zygote, place: Dict[str, Path], tiny_disk: Path) -> None:
    """Checkpoints of 120 KB: two fit, the third does not; the first ones stay whole and the run goes on when there is room."""
    words = ["train", place["config"], "train.steps=8", "train.keep_last=9", "--out", tiny_disk / "run"]
    ended = zygote.run(words)
    assert_explained(ended.code, ended.err, Row("", "", 1, "the disk is full"))
    store = CheckpointStore(tiny_disk / "run" / "checkpoints")
    assert store.steps() and store.latest() is not None and not list(store.root.glob(".*"))
    subprocess.run(["mount", "-o", "remount,size=30m", str(tiny_disk)], check=True)
    assert zygote.run(["resume", tiny_disk / "run"]).code == 0
    assert store.steps()[-1] == 8
