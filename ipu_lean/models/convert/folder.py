"""Folders as Hugging Face's transformers writes them: config.json and weights, read without that library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ipu_lean import _compat
from ipu_lean.errors import ConfigError

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
Tensors = Dict[str, torch.Tensor]


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder of transformers."""
    return (path / CONFIG).is_file()


def read_settings(path: Path) -> Dict[str, Any]:
    """config.json. ConfigError if it is not there or cannot be read."""
    found = read_json(path / CONFIG)
    if not found.get("model_type"):
        raise ConfigError(f"{path / CONFIG} names no model_type", key="SOURCE")
    return found


def read_tensors(path: Path) -> Tensors:
    """All weights by name: one file, or the shards that an index names; safetensors before pickles (plain tensors only)."""
    for name in WEIGHTS:
        index = path / f"{name}.index.json"
        if (path / name).is_file():
            files: List[str] = [name]
        elif index.is_file():
            files = sorted(set(read_json(index).get("weight_map", {}).values()))
        else:
            continue
        found: Tensors = {}
        for file in files:
            found.update(_read_file(path / file))
        return found
    raise ConfigError(f"{path} holds no {' and no '.join(WEIGHTS)}", key="SOURCE", suggestion="download the weights as well")


def _read_file(path: Path) -> Tensors:
    try:
        if path.suffix == ".safetensors":
            return load_file(str(path))
        found = _compat.load_weights(str(path))
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", key="SOURCE") from error
    except Exception as error:  # torch raises many kinds for a file that is not its own, or that would run code
        rule = "it is damaged, or holds more than tensors, and no code in it is run"
        raise ConfigError(f"{path} cannot be read: {rule}", key="SOURCE") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        raise ConfigError(f"{path} is no mapping of names to tensors", key="SOURCE")
    return found


def read_json(path: Path) -> Dict[str, Any]:
    """A JSON object. ConfigError if it cannot be read, or is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", key="SOURCE") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", key="SOURCE") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a JSON object", key="SOURCE")
    return found


def write_json(path: Path, content: Dict[str, Any]) -> None:
    """JSON as transformers writes it."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write(path: Path, settings: Dict[str, Any], tensors: Tensors) -> None:
    """config.json and model.safetensors in the folder `path`, which is there."""
    write_json(path / CONFIG, settings)
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(plain, str(path / "model.safetensors"), metadata={"format": "pt"})
