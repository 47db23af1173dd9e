"""Checkpoints: a directory each, written whole or not at all, and found again after a kill at any moment.

    checkpoints/step-00001000/{model.safetensors, optimizer.pt, roles.json, trainer.json, tokenizer/, manifest.json}
    checkpoints/last   checkpoints/best      one line each: the name of a directory

A checkpoint is written under a temporary name; every file is flushed; the manifest (SHA-256 of each file) comes last; then
one rename makes it visible. A reader trusts no name: it takes the newest directory whose manifest holds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ipu_lean import _compat
from ipu_lean.errors import CheckpointError
from ipu_lean.train.files import disk_guard, fsync_directory, fsync_file, read_json, remove_tree, sha256, write_atomic

SCHEMA = 1
_NAME = re.compile(r"step-(\d+)$")
Say = Callable[[str], None]


@dataclass
class Snapshot:
    """Everything a run needs to go on.

    `model`: full tensors by name (on CPU); `optimizer`: `{"state": {name: {key: tensor}}, "groups": [...]}`, empty when only the
    weights were asked for; `trainer`: plain JSON (step, RNG, data position, …); `roles`: the text of roles.json;
    `save_tokenizer`: writes the tokenizer's files into a directory.
    """

    model: Dict[str, torch.Tensor]
    optimizer: Dict[str, Any]
    trainer: Dict[str, Any]
    roles: str
    save_tokenizer: Optional[Callable[[str], None]] = None


def step_name(step: int) -> str:
    """Directory name of the checkpoint after `step` weight updates."""
    return f"step-{step:08d}"


class CheckpointStore:
    """The `checkpoints/` directory of one run. `say` receives remarks such as "last names a damaged checkpoint"."""

    def __init__(self, root: Path, say: Say = lambda text: None) -> None:
        self.root, self.say = Path(root), say

    # -- finding ---------------------------------------------------------------------------------------------------------
    def steps(self) -> List[int]:
        """Steps that have a directory, oldest first (whole or not)."""
        if not self.root.is_dir():
            return []
        found = (_NAME.match(entry.name) for entry in self.root.iterdir() if entry.is_dir())
        return sorted(int(match.group(1)) for match in found if match)

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` lies or will lie."""
        return self.root / step_name(step)

    def latest(self) -> Optional[Path]:
        """The newest whole checkpoint, None if there is none; says so when `last` names another one or a newer one is damaged."""
        named = self._pointer("last")
        for step in reversed(self.steps()):
            path = self.path(step)
            problem = damage(path)
            if problem:
                self.say(f"warning: checkpoint {path.name} is damaged ({problem}); looking for an older one.")
                continue
            if named != path.name:
                self.say(f"warning: `last` names {named or 'nothing'}; using {path.name}, the newest whole checkpoint.")
            return path
        return None

    def find(self, which: str) -> Path:
        """`last`, `best`, or a step number -> path of a whole checkpoint; CheckpointError when there is none."""
        if which == "last":
            path = self.latest()
            if path is None:
                raise CheckpointError(f"{self.root} holds no whole checkpoint; resume or restart the run to make one.")
            return path
        if which == "best":
            name = self._pointer("best")
            if name is None:
                raise CheckpointError(
                    f"{self.root} names no best checkpoint (train.keep_best was off, or no evaluation took place yet)."
                )
            path = self.root / name
        else:
            digits = which.replace("step-", "")
            if not digits.isdigit():
                raise CheckpointError(f"checkpoint {which!r} is neither `last`, `best` nor a step number.")
            path = self.path(int(digits))
        if not path.is_dir():
            have = ", ".join(str(step) for step in self.steps()) or "none"
            raise CheckpointError(f"{path} does not exist; steps with a checkpoint: {have}.")
        problem = damage(path)
        if problem:
            raise CheckpointError(f"checkpoint {path} is damaged: {problem}.")
        return path

    def has_best(self) -> bool:
        """Whether a best checkpoint is marked and there."""
        name = self._pointer("best")
        return name is not None and (self.root / name).is_dir()

    def _pointer(self, name: str) -> Optional[str]:
        try:
            text = (self.root / name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return text if _NAME.match(text) else None

    # -- writing ---------------------------------------------------------------------------------------------------------
    def write(self, step: int, snapshot: Snapshot) -> Path:
        """Write the checkpoint of `step` and point `last` at it. RunError when the disk is full; older checkpoints stay
        as they are.
        """
        final = self.path(step)
        if final.is_dir() and damage(final) is None:
            # A resumed run came by here again: the same step of the same run, already on the disk.
            write_atomic(self.root / "last", final.name + "\n")
            return final
        temporary = self.root / f".tmp-{final.name}-{os.getpid()}"
        try:
            with disk_guard(f"checkpoint {final.name} was not written, the ones before it are untouched"):
                self.root.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                _write_files(temporary, step, snapshot)
                if final.exists():
                    remove_tree(final)
                os.replace(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        fsync_directory(self.root)
        write_atomic(self.root / "last", final.name + "\n")
        return final

    def mark_best(self, step: int) -> None:
        """Point `best` at the checkpoint of `step`, which must be there."""
        write_atomic(self.root / "best", step_name(step) + "\n")

    def prune(self, keep_last: int, best: Optional[int]) -> List[int]:
        """Delete all but the newest `keep_last` and the best one; returns the deleted steps. Safe to kill at any moment."""
        steps = self.steps()
        keep = set(steps[len(steps) - max(1, keep_last) :]) | {best}
        gone = [step for step in steps if step not in keep]
        for step in gone:
            remove_tree(self.path(step))
        return gone

    def put_aside_after(self, source: Optional[Path]) -> None:
        """Rename checkpoints newer than `source`, which `latest` found damaged: they must not count as the newest ones
        any more.
        """
        limit = -1 if source is None else int(_NAME.match(source.name).group(1))
        for step in self.steps():
            if step > limit:
                aside = self.root / f"damaged-{step_name(step)}"
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(self.path(step), aside)
                self.say(f"warning: {step_name(step)} was renamed to {aside.name}.")

    def clean(self) -> None:
        """Remove what a killed process left half-written or half-deleted."""
        if self.root.is_dir():
            for entry in self.root.iterdir():
                if entry.name.startswith((".tmp-", ".trash-")):
                    shutil.rmtree(entry, ignore_errors=True)
                elif entry.name.startswith(".") and ".tmp-" in entry.name:
                    entry.unlink()


def _write_files(folder: Path, step: int, snapshot: Snapshot) -> None:
    """All files of one checkpoint, flushed, the manifest last."""
    tensors, ties = untie(snapshot.model)
    # One metadata key only: safetensors writes several in an order that differs between processes, and files are compared.
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    torch.save(snapshot.optimizer, str(folder / "optimizer.pt"))
    (folder / "roles.json").write_text(snapshot.roles, encoding="utf-8")
    (folder / "trainer.json").write_text(json.dumps(snapshot.trainer, indent=1) + "\n", encoding="utf-8")
    if snapshot.save_tokenizer is not None:
        (folder / "tokenizer").mkdir()
        snapshot.save_tokenizer(str(folder / "tokenizer"))
    entries = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            fsync_file(path)
            entries[path.relative_to(folder).as_posix()] = {"sha256": sha256(path), "bytes": path.stat().st_size}
        else:
            fsync_directory(path)
    manifest = {"schema": SCHEMA, "step": step, "ties": ties, "files": entries}
    write_atomic(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")


def untie(state: Dict[str, torch.Tensor]) -> Tuple[Dict[str, torch.Tensor], Dict[str, str]]:
    """Tensors that share memory are stored once: ({name: tensor}, {left-out name: stored name})."""
    stored: Dict[str, torch.Tensor] = {}
    ties: Dict[str, str] = {}
    seen: Dict[Tuple[int, Tuple[int, ...], Tuple[int, ...]], str] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and key in seen:
            ties[name] = seen[key]
            continue
        seen[key] = name
        stored[name] = tensor.detach().cpu().contiguous()
    return stored, ties


# -- reading -----------------------------------------------------------------------------------------------------------------
def damage(path: Path) -> Optional[str]:
    """What is wrong with the checkpoint in `path`, in words; None when every file agrees with the manifest."""
    manifest = read_json(path / "manifest.json")
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return "manifest.json is missing or unreadable"
    if manifest.get("schema") != SCHEMA:
        return f"manifest.json has schema {manifest.get('schema')!r}, this version reads {SCHEMA}"
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"] or sha256(file) != entry["sha256"]:
            return f"{name} differs from its checksum"
    for name in ("model.safetensors", "optimizer.pt", "roles.json", "trainer.json"):
        if name not in manifest["files"]:
            return f"{name} is not in the manifest"
    return None


def read(path: Path, *, weights_only: bool = False) -> Snapshot:
    """The snapshot in `path` (checked before by `find` or `latest`). CheckpointError names the file that cannot be read."""
    trainer = read_json(path / "trainer.json")
    if not isinstance(trainer, dict):
        raise CheckpointError(f"{path / 'trainer.json'} cannot be read.")
    optimizer: Dict[str, Any] = {}
    if not weights_only:
        try:
            optimizer = _compat.load_weights(str(path / "optimizer.pt"))
        except Exception as error:  # torch raises many kinds for a file that is not its own
            raise CheckpointError(f"{path / 'optimizer.pt'} cannot be read: {str(error).splitlines()[0]}") from error
    return Snapshot(read_model(path), optimizer, trainer, (path / "roles.json").read_text(encoding="utf-8"))


def read_model(path: Path) -> Dict[str, torch.Tensor]:
    """Weights of the checkpoint in `path` by name, tied names included (they share memory)."""
    file = path / "model.safetensors"
    try:
        tensors = load_file(str(file))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    manifest = read_json(path / "manifest.json") or {}
    for name, stored in manifest.get("ties", {}).items():
        tensors[name] = tensors[stored]
    return tensors


def load_into(model: torch.nn.Module, tensors: Dict[str, torch.Tensor], source: Path) -> None:
    """Copy `tensors` into `model`; CheckpointError lists the first differences when names or shapes do not agree."""
    wanted = model.state_dict()
    wrong = [f"{name} is missing" for name in wanted if name not in tensors]
    wrong += [f"{name} is unknown" for name in tensors if name not in wanted]
    wrong += [
        f"{name} has shape {list(tensors[name].shape)}, the model {list(value.shape)}"
        for name, value in wanted.items()
        if name in tensors and isinstance(value, torch.Tensor) and value.shape != tensors[name].shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"{source} does not fit the model of this config: {'; '.join(wrong[:3])}{more}.")
    model.load_state_dict(tensors)
