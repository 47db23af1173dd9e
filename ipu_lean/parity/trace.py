"""A recorded run on disk: what it started from, what each step gave. Two of them are compared anywhere, on any machine.

    DIR/manifest.json            what ran, losses by update, names in order; written last, so a trace without it is not whole
    DIR/config.yaml              the configuration of this side
    DIR/start.safetensors        weights before the first update
    DIR/batches.safetensors      tokens (or images) and labels [updates, rows, ...]
    DIR/activations.safetensors  of the first micro-batch
    DIR/gradients.safetensors    of the first update
    DIR/weights-000004.safetensors ...                                 after that many updates
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List

import torch

from ipu_lean.errors import ConfigError
from ipu_lean.train.files import disk_guard, read_json, write_atomic, write_json

SCHEMA = 1
Tensors = Dict[str, torch.Tensor]


@dataclass
class Start:
    """What both sides begin with.

    Attributes:
        weights: by name, float32, on the CPU.
        tokens, labels: int32 `[updates, rows, seq]`; of an mlp the images, float32 `[updates, rows, features]`, and int32
            `[updates, rows]`.
        drawn: tensors that were zero at initialisation and were drawn at random for the comparison.
        zero_gradients: tensors whose gradient is zero in exact arithmetic when no matrix is zero (measured in float64).
        vocab: rows of the readout.
    """

    weights: Tensors
    tokens: torch.Tensor
    labels: torch.Tensor
    drawn: List[str]
    zero_gradients: List[str]
    vocab: int

    @property
    def updates(self) -> int:
        """Weight updates that the batches are enough for."""
        return int(self.tokens.shape[0])

    def digest(self) -> str:
        """SHA-256 over weights and batches: equal for two traces that began alike."""
        digest = hashlib.sha256()
        for name in sorted(self.weights):
            digest.update(name.encode())
            digest.update(_bytes(self.weights[name]))
        for batches in (self.tokens, self.labels):
            digest.update(str(tuple(batches.shape)).encode())
            digest.update(_bytes(batches))
        return digest.hexdigest()


@dataclass
class Trace:
    """One side of a comparison.

    Attributes:
        facts: device, backend, precision, optimizer, versions: plain JSON.
        start: see Start.
        losses, lrs: one for each update. updates_per_call: how many the device makes before the host sees its weights.
        activations: in the order of the forward pass. gradients: by parameter, in the model's order.
        weights: number of updates made -> weights by name.
        spread: the same steps and names -> relative distance to a second run that differs in rounding only; empty for IPUs.
    """

    facts: Dict[str, Any]
    start: Start
    updates_per_call: int
    losses: List[float] = field(default_factory=list)
    lrs: List[float] = field(default_factory=list)
    activations: Tensors = field(default_factory=dict)
    gradients: Tensors = field(default_factory=dict)
    weights: Dict[int, Tensors] = field(default_factory=dict)
    spread: Dict[int, Dict[str, float]] = field(default_factory=dict)

    def save(self, path: Path, config_text: str) -> Path:
        """Write the trace into the empty or missing directory `path`; the manifest comes last."""
        with disk_guard(f"the trace {path} was not written"):
            path.mkdir(parents=True, exist_ok=True)
            write_atomic(path / "config.yaml", config_text)
            _write(path / "start.safetensors", self.start.weights)
            _write(path / "batches.safetensors", {"tokens": self.start.tokens, "labels": self.start.labels})
            _write(path / "activations.safetensors", self.activations)
            _write(path / "gradients.safetensors", self.gradients)
            for updates, weights in self.weights.items():
                _write(path / _weights_file(updates), weights)
            write_json(path / "manifest.json", self._manifest())
        return path

    def _manifest(self) -> Dict[str, Any]:
        return {
            "schema": SCHEMA,
            "facts": self.facts,
            "start": {
                "digest": self.start.digest(),
                "names": list(self.start.weights),
                "drawn": self.start.drawn,
                "zero_gradients": self.start.zero_gradients,
                "vocab": self.start.vocab,
            },
            "updates_per_call": self.updates_per_call,
            "losses": self.losses,
            "lrs": self.lrs,
            "activations": list(self.activations),
            "gradients": list(self.gradients),
            "weights": sorted(self.weights),
            "spread": {str(step): values for step, values in self.spread.items()},
        }


def load_trace(path: Path) -> Trace:
    """Read a trace back. ConfigError when the directory holds none, or another schema's."""
    manifest = read_json(path / "manifest.json")
    if manifest is None:
        raise ConfigError(f"{path} holds no whole trace (manifest.json)", suggestion="make one with `ipu-lean parity record`")
    if manifest.get("schema") != SCHEMA:
        raise ConfigError(f"{path} is a trace of schema {manifest.get('schema')}, this version reads {SCHEMA}")
    entry = manifest["start"]
    batches = _read(path / "batches.safetensors", ["tokens", "labels"])
    weights = _read(path / "start.safetensors", entry["names"])
    start = Start(weights, batches["tokens"], batches["labels"], entry["drawn"], entry["zero_gradients"], entry["vocab"])
    if start.digest() != entry["digest"]:
        raise ConfigError(f"the weights or batches in {path} are not those that were recorded", suggestion="record it again")
    return Trace(
        manifest["facts"],
        start,
        manifest["updates_per_call"],
        manifest["losses"],
        manifest["lrs"],
        _read(path / "activations.safetensors", manifest["activations"]),
        _read(path / "gradients.safetensors", manifest["gradients"]),
        {updates: _read(path / _weights_file(updates), entry["names"]) for updates in manifest["weights"]},
        {int(step): values for step, values in manifest["spread"].items()},
    )


def _weights_file(updates: int) -> str:
    return f"weights-{updates:06d}.safetensors"


def _write(path: Path, tensors: Tensors) -> None:
    from safetensors.torch import save_file

    # One storage each: safetensors refuses tensors that share one, and tied names are kept once by the caller.
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, str(path))


def _read(path: Path, names: List[str]) -> Tensors:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(str(path))
        return {name: found[name] for name in names}
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read as part of a trace: {error}", suggestion="record it again") from error


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().cpu().numpy().tobytes()


def check_alike(reference: Trace, candidate: Trace) -> int:
    """Updates that both made. ConfigError unless both began with the same weights and batches."""
    one, other = reference.start, candidate.start
    if list(one.weights) != list(other.weights):
        odd = sorted(set(one.weights) ^ set(other.weights))
        raise ConfigError(f"the traces are of different models; these tensors are in one only: {', '.join(odd[:5]) or 'order'}")
    for name in one.weights:
        if one.weights[name].shape != other.weights[name].shape:
            shapes = f"{list(one.weights[name].shape)} and {list(other.weights[name].shape)}"
            raise ConfigError(f"the traces are of different models: `{name}` is {shapes}")
        if not torch.equal(one.weights[name], other.weights[name]):
            raise _unlike(f"`{name}` differs before the first update")
    updates = min(one.updates, other.updates)
    for what in ("tokens", "labels"):
        left, right = getattr(one, what), getattr(other, what)
        if left.shape[1:] != right.shape[1:] or not torch.equal(left[:updates], right[:updates]):
            raise _unlike(f"the {what} differ ({list(left.shape)} and {list(right.shape)})")
    return min(len(reference.losses), len(candidate.losses))


def _unlike(what: str) -> ConfigError:
    return ConfigError(
        f"both sides must start from the same weights and batches, and {what}",
        suggestion="record the second trace with `--start DIR` of the first",
    )


def relative_distance(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """|u - v| / |u| (norms, float64); infinite where the reference is zero and the candidate is not."""
    u, v = reference.detach().double(), candidate.detach().double()
    gap, norm = (u - v).norm().item(), u.norm().item()
    return gap / norm if norm else (0.0 if gap == 0.0 else math.inf)
