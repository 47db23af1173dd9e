"""Ctrl-C in commands that make a directory: it is gone again, or the message says how to go on; and a reader that went away."""

from __future__ import annotations

import importlib

import pytest

from ipu_lean.cli import main

CONFIG = """
name: tiny
model: {width: 16, depth: 1, heads: 1, seq: 16}
mup: {base_width: 16}
data: {corpus: text.txt, cache: cache, validation: {valid: 0.2}}
batch: {micro: 2}
train: {steps: 2, eval_every: 2, eval_batches: 1, save_every: 1, log_every: 1, sample: {tokens: 2}}
"""
STUDY = "study: {variants: {one: {}, two: {optimizer.lr: 0.1}}}\n"
PLACES = {
    "memory": ("train.memory.commands", "in_fresh_process"),
    "coord-check": ("sweep.coord.commands", "_measured"),
    "parity": ("parity.commands", "record"),
    "study": ("sweep.study.commands", "task_of_all"),
    "sweep": ("sweep.directory", "task_of_all"),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with tiny.yaml and a text, in which commands are run."""
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stopped_in(monkeypatch, command, before=lambda: None):
    """Puts Ctrl-C where `command` does its work."""
    module, name = PLACES[command]

    def stop(*_, **__):
        before()
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(f"ipu_lean.{module}"), name, stop)


@pytest.mark.parametrize("command", ["memory", "coord-check", "parity"])
@pytest.mark.parametrize("there", [False, True])
def test_what_cannot_go_on_leaves_nothing(place, monkeypatch, capsys, command, there):
    out = place / "out"
    if there:
        out.mkdir()
    stopped_in(monkeypatch, command)
    for _ in range(2):  # the same command may be given again
        assert main([command, "tiny.yaml", "--out", "out"]) == 130
        assert "nothing was changed" in capsys.readouterr().err
        assert out.exists() == there and not (there and list(out.iterdir()))


def test_what_somebody_put_there_stays(place, monkeypatch, capsys):
    stopped_in(monkeypatch, "memory", lambda: (place / "out" / "mine.txt").write_text("mine"))
    assert main(["memory", "tiny.yaml", "--out", "out"]) == 130
    assert "mine.txt" in capsys.readouterr().err and (place / "out" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("command", ["study", "sweep"])
def test_what_goes_on_says_how(place, monkeypatch, capsys, command):
    import os
    import signal

    flags = ["--lrs", "2^-8,2^-7", "--seeds", "1"] if command == "sweep" else []
    if command == "study":
        (place / "tiny.yaml").write_text(CONFIG + STUDY)
    stopped_in(monkeypatch, command, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert main([command, "tiny.yaml", *flags, "--out", "out"]) == 130
    assert f"ipu-lean {command} {place / 'out'}" in capsys.readouterr().err
