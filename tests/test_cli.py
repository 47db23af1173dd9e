"""The command line from outside: exit codes, one paragraph for each mistake, the JSON object, overrides anywhere."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ipu_lean.cli as cli
from ipu_lean.errors import EnvironmentProblem, Interrupted, RunError, VerdictFailed

pytestmark = pytest.mark.pod
ROOT = Path(__file__).parents[1]
TINY = """
name: tiny
model: {width: 16, depth: 1, heads: 1, seq: 16}
mup: {base_width: 16}
data: {corpus: text.txt, cache: cache, validation: {valid: 0.2}}
batch: {micro: 2}
train: {steps: 2, eval_every: 2, eval_batches: 1, save_every: 1, log_every: 1, sample: {tokens: 2}}
logging: {progress: none}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with tiny.yaml and a text, in which commands are run."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A run directory of two updates."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    config = TINY.replace("text.txt", str(folder / "text.txt")).replace("cache: cache", f"cache: {folder / 'cache'}")
    assert cli.main(["train", config, "--out", str(folder / "run")]) == 0
    return folder / "run"


def environment():
    """For a fresh process: this package importable, warnings as a user has them."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    return {**environ, "PYTHONPATH": str(ROOT)}


def fails(capsys, arguments, code):
    """Runs a command that must fail so; returns its one paragraph."""
    assert cli.main(arguments) == code
    text = capsys.readouterr().err
    paragraphs = [line for line in text.splitlines() if line.startswith("ipu-lean: error: ")]
    assert len(paragraphs) == 1, text
    assert "Traceback" not in text
    return paragraphs[0]


MISTAKES = [
    # exit code, words of the message, overrides of tiny.yaml
    (2, "did you mean `model.width`", ["model.widht=32"]),
    (2, "did you mean `train.steps`", ["train.stpes=3"]),
    (2, "did you mean `optimizer.lr`", ["lr=3"]),
    (2, "key.path=value", ["=3"]),
    (2, "whole number", ["model.width=16.0"]),
    (2, "whole number", ["train.steps=many"]),
    (2, "a number", ["optimizer.lr=fast"]),
    (2, "finite", ["optimizer.lr=.inf"]),
    (2, "true or false", ["model.tied=1"]),
    (2, "true or false. Write true", ["model.tied=yes"]),
    (2, "greater than 0", ["optimizer.lr=-1e-3"]),
    (2, "at least 1", ["model.depth=0"]),
    (2, "less than 1", ["model.dropout=1.0"]),
    (2, "must be a list", ["ipu.layers_per_ipu=4"]),
    (2, "a section", ["model=3"]),
    (2, "one of cpu, gpu", ["device=cuda"]),
    (2, "did you mean `bf16-mixed`", ["precision=bf16_mixed"]),
    (2, "AdamW only", ["precision=bf16-pure", "optimizer.kind=adam"]),
    (2, "IPU's arithmetic", ["precision=fp16-ipu"]),
    (2, "divide model.width", ["model.heads=3"]),
    (2, "together fix", ["model.head_size=4"]),
    (2, "pairs", ["model.heads=16"]),
    (2, "even", ["model.stack.order=aaff"]),
    (2, "no beta", ["model.stack.beta=0.5"]),
    (2, "one of additive", ["model.stack.coupling=impulse"]),
    (2, "inverted", ["model.stack.kind=residual", "memory.engine=invert"]),
    (2, "needs a base", ["mup.base_width=null"]),
    (2, "no such file", ["mup.base=gone.yaml", "mup.base_width=null"]),
    (2, "257 pieces", ["model.vocab=256"]),
    (2, "always has 257", ["data.tokenizer.vocab=512"]),
    (2, "multiple", ["batch.device_iterations=4"]),
    (2, "warm-up", ["schedule.warmup=3"]),
    (2, "evenly", ["train.processes=2"]),
    (2, "has no momentum", ["optimizer.momentum=0.9"]),
    (2, "between 0 and 1", ["data.validation.valid=2.0"]),
    (2, "data.corpus", ["data.corpus=gone.txt"]),
    (2, "data.corpus", ["data.corpus=empty.txt"]),
    (2, "data.corpus", ["data.corpus=folder"]),
    (2, "data.validation.other", ["data.validation.other=gone.txt"]),
    (2, "model.seq", ["model.seq=100000"]),
    (2, "data.tokenizer.path", ["data.tokenizer.kind=bpe", "data.tokenizer.path=gone"]),
    (3, "device: cpu", ["device=ipu"]),
    (3, "package", ["data.corpus=hf:no/such"]),
]


@pytest.mark.parametrize("code, words, overrides", MISTAKES, ids=[" ".join(case[2]) for case in MISTAKES])
def test_mistake_in_a_config(place, capsys, code, words, overrides):
    (place / "empty.txt").write_text("")
    (place / "folder").mkdir()
    text = fails(capsys, ["train", "tiny.yaml", *overrides, "--out", "run"], code)
    assert words in text
    assert not (place / "run").exists()


def test_mistakes_in_the_file_name_the_line(place, capsys):
    (place / "bad.yaml").write_text("seed: 1\nmodel:\n  width: 16\n  width: 32\n")
    assert "bad.yaml:4: `model.width`: this key stands twice" in fails(capsys, ["train", "bad.yaml"], 2)
    (place / "bad.yaml").write_text("seed: 1\nmodle: {width: 16}\n")
    assert "bad.yaml:2: `modle`: there is no such key (did you mean `model`?)" in fails(capsys, ["prepare", "bad.yaml"], 2)
    assert "tiny.yaml" in fails(capsys, ["explain", "gone.yaml"], 2)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "COMMAND"),
        (["trian", "tiny.yaml"], "did you mean `train`"),
        (["train"], "CONFIG"),
        (["train", "tiny.yaml", "--ot", "x"], "--ot"),
        (["train", "tiny.yaml", "--json", "seed"], "seed"),
        (["config", "shw", "tiny.yaml"], "shw"),
        (["generate", "run", "--tokens", "many"], "--tokens"),
        (["generate", "run", "seed=3"], "seed=3"),
        (["doctor", "tiny.yaml"], "tiny.yaml"),
        (["eval", "gone"], "gone"),
        (["resume", "gone"], "gone"),
        (["generate", "gone"], "gone"),
    ],
)
def test_mistake_in_the_arguments(place, capsys, arguments, words):
    assert words in fails(capsys, arguments, 2)


def test_overrides_may_stand_anywhere(place, capsys):
    arguments = ["config", "show", "tiny.yaml", "seed=1", "--json", "train.steps=4", "--changed", "train.save_every=2"]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "seed: 1 " in text and "steps: 4 " in text and "save_every: 2 " in text


def test_an_out_directory_that_holds_something_is_refused(place, capsys):
    (place / "run").mkdir()
    (place / "run" / "notes").write_text("mine")
    assert "not empty" in fails(capsys, ["train", "tiny.yaml", "--out", "run"], 2)
    assert os.listdir("run") == ["notes"]


def test_train_eval_generate_resume_in_words_and_json(place, capsys):
    assert cli.main(["train", "tiny.yaml", "--out", "run", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary == json.loads((place / "run" / "summary.json").read_text())
    assert (summary["command"], summary["status"], summary["exit_code"], summary["steps"]) == ("train", "ok", 0, 2)
    assert cli.main(["eval", "run", "--checkpoint", "last", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["command"] == "eval"
    assert cli.main(["generate", "run", "--prompt", "the ", "--tokens", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("the ")
    assert cli.main(["resume", "run", "logging.progress=plain"]) == 0
    assert "already finished: 2 of 2 steps; to go on: ipu-lean resume " in capsys.readouterr().out
    assert cli.main(["resume", "run", "train.steps=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 3


def test_prepare_and_explain(place, capsys):
    assert cli.main(["prepare", "tiny.yaml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    tokens = found["metrics"]["tokens"]
    assert tokens["train"] + tokens["valid"] == 60 * 44 + 1  # the bytes of text.txt and one end of text
    assert tokens["valid"] == round(0.2 * (60 * 44 + 1))
    assert found["metrics"]["vocab"] == 257
    assert cli.main(["explain", "tiny.yaml", "model.width=64"]) == 0
    assert "hidden" in capsys.readouterr().out


def test_an_unreadable_checkpoint_is_a_failed_run(finished_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(str(finished_run), str(run))
    for weights in run.glob("checkpoints/*/model.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-7] + b"garbage")
    assert "checkpoint" in fails(capsys, ["eval", str(run)], 1)
    assert "checkpoint" in fails(capsys, ["generate", str(run)], 1)


def test_the_newest_whole_checkpoint_is_used(finished_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(str(finished_run), str(run))
    older, newest = sorted(run.glob("checkpoints/step-*"))
    (run / "checkpoints" / "best").write_text(newest.name + "\n")
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert "is used by `--checkpoint last`" in fails(capsys, ["eval", str(run)], 1)
    assert cli.main(["eval", str(run), "--checkpoint", "last", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["artifacts"]["checkpoint"] == str(older) and newest.name in err
    shutil.rmtree(str(run / "checkpoints"))
    said = fails(capsys, ["eval", str(run)], 1)
    assert "holds no whole checkpoint" in said and "using the last one" not in said


def test_a_run_without_config_is_a_mistake(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    assert "config.yaml" in fails(capsys, ["eval", str(tmp_path / "run")], 2)


def test_a_checkpoint_that_is_not_there(finished_run, capsys):
    assert "12345" in fails(capsys, ["eval", str(finished_run), "--checkpoint", "12345"], 2)


def test_a_full_disk_is_a_failed_run(place):
    """The kernel refuses to write beyond a size limit, as it refuses on a full disk."""
    pytest.importorskip("resource", reason="only POSIX limits the size of files")
    code = (
        "import resource, sys; from ipu_lean.cli import main; import ipu_lean.train\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))\n"
        "sys.exit(main(['train', 'tiny.yaml', 'model.width=64', 'mup.base_width=64', '--out', 'run']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == 1, done.stderr
    assert "disk is full" in done.stderr
    assert f"Make room, then: ipu-lean resume {Path('run').absolute()}" in done.stderr
    assert "Traceback" not in done.stderr


# --- errors that come from below, mapped in one place ---


def raising(monkeypatch, error):
    def run(arguments):
        raise error

    monkeypatch.setattr(cli, "doctor", run)


@pytest.mark.parametrize(
    "error, code, words",
    [
        (RunError("the loss is not finite."), 1, "not finite"),
        (VerdictFailed("parity: no."), 4, "parity"),
        (OSError(errno.ENOSPC, "No space left on device", "/some/file"), 1, "/some/file"),
        (PermissionError(errno.EACCES, "Permission denied", "/etc/x"), 3, "/etc/x"),
        (OSError(errno.EIO, "Input/output error", "/dev/x"), 1, "/dev/x"),
        (MemoryError(), 1, "batch.micro"),
        (RuntimeError("CUDA out of memory. Tried to allocate 3 GiB"), 1, "batch.micro"),
        (ModuleNotFoundError("No module named 'safetensors'", name="safetensors"), 3, "safetensors"),
    ],
)
def test_exit_codes_of_errors(monkeypatch, capsys, error, code, words):
    raising(monkeypatch, error)
    assert words in fails(capsys, ["doctor"], code)
    assert cli.main(["doctor", "--json"]) == code
    outcome = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (outcome["exit_code"], outcome["command"], outcome["status"]) == (code, "doctor", "failed")
    assert words in outcome["error"]


STOPS = [(Interrupted("saved; ipu-lean resume x"), "resume x"), (KeyboardInterrupt(), "interrupted")]


@pytest.mark.parametrize("error, words", STOPS)
def test_interruption_is_130(monkeypatch, capsys, error, words):
    raising(monkeypatch, error)
    assert cli.main(["doctor", "--json"]) == 130
    captured = capsys.readouterr()
    assert words in captured.err and "error" not in captured.err
    assert json.loads(captured.out.splitlines()[-1])["status"] == "interrupted"


def test_our_own_bugs_keep_their_traceback(monkeypatch):
    raising(monkeypatch, AssertionError("a bug"))
    with pytest.raises(AssertionError):
        cli.main(["doctor"])


def test_a_reader_that_goes_away_is_met_with_silence():
    code = "import sys; from ipu_lean.cli import main; sys.stdin.read(); sys.exit(main(['config', 'schema']))"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment(), **pipes)
    process.stdout.close()
    process.stdin.close()  # only now does it begin to write
    assert process.stderr.read() == b""
    assert process.wait() == 1


def test_library_warnings_are_silent_and_ours_are_one_line():
    code = (
        "import warnings, ipu_lean.cli as cli\n"
        "cli.quieten()\n"
        "warnings.warn('theirs')\n"
        "warnings.warn_explicit('ours', UserWarning, 'x.py', 1, module='ipu_lean.data.prepare')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.stderr == "ipu-lean: warning: ours\n"


def test_a_training_that_nobody_listens_to_goes_on(place):
    code = "import sys; from ipu_lean.cli import main; sys.stdin.read(); sys.exit(main(sys.argv[1:]))"
    words = ["train", "tiny.yaml", "--out", "run", "logging.progress=plain", "--json"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code, *words], env=environment(), **pipes)
    process.stdout.close()
    process.stdin.close()  # only now does it begin to write
    assert process.stderr.read() == b"warning: nobody reads the output any more; going on without it.\n"
    assert process.wait() == 0
    assert json.loads((place / "run" / "summary.json").read_text())["steps"] == 2


def test_figures_that_cannot_be_kept_are_told(finished_run, capsys, monkeypatch):
    def refused(path, value):
        raise EnvironmentProblem(f"no permission to write {path}.")

    monkeypatch.setattr("ipu_lean.train.reuse.write_json", refused)
    assert cli.main(["eval", str(finished_run), "--json"]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out.splitlines()[-1])
    assert summary["metrics"]["valid"]["tokens"] > 0 and "eval" not in summary["artifacts"]
    assert "warning: eval.json was not kept: no permission" in err
