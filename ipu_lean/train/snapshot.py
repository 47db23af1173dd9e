"""What lies in one checkpoint directory: the state itself, written and flushed file by file, read back, and checked.

model.safetensors  optimizer.pt  roles.json  trainer.json  tokenizer/  manifest.json (SHA-256 of each file, written last)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, Optional, Tuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ipu_lean import _compat
from ipu_lean.errors import CheckpointError
from ipu_lean.train.files import fsync_directory, fsync_file, read_json, sha256, write_atomic

SCHEMA = 1


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


def write_files(folder: Path, step: int, snapshot: Snapshot) -> None:
    """All files of one checkpoint, flushed, the manifest last."""
    tensors, ties = untie(snapshot.model)
    # One metadata key only: safetensors writes several in an order that differs between processes, and files are compared.
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _save_pickle(snapshot.optimizer, folder / "optimizer.pt")
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


class _Recorder:
    """A file for torch.save that remembers why a write failed: torch hides that behind a complaint about positions."""

    def __init__(self, handle: BinaryIO) -> None:
        self.handle, self.error = handle, None

    def write(self, data: Any) -> int:
        """As a file's."""
        try:
            return self.handle.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """As a file's."""
        self.handle.flush()


def _save_pickle(value: Any, path: Path) -> None:
    """`torch.save`, raising the OSError of a write that failed."""
    with open(path, "wb") as handle:
        recorder = _Recorder(handle)
        try:
            torch.save(value, recorder)
        except RuntimeError:
            if recorder.error is not None:
                raise recorder.error from None
            raise


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
