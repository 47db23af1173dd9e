"""Measures one mode in a process of its own, so that what is held is what the process (CPU) or the allocator (GPU) holds.

Reads a configuration from standard input and writes one JSON object as the last line of standard output.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np
import torch

from ipu_lean._compat import TORCH
from ipu_lean.config import Config, load_config
from ipu_lean.data import blank_batch, expected_classes
from ipu_lean.models import build_model
from ipu_lean.optim import AnyPrecisionAdamW
from ipu_lean.train.alive import Alive
from ipu_lean.train.engines import make_engine
from ipu_lean.train.engines.protocol import Batch
from ipu_lean.train.engines.torch_engine import TorchEngine
from ipu_lean.train.precision import autocast
from ipu_lean.train.world import World

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
_KEPT = ("compensation", "lower", "lowest")


class Meter:
    """Bytes that this process holds on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.source = "allocator" if device.type == "cuda" else "process" if _status("RssAnon") is not None else "tensors"
        self._files: Optional[int] = None

    def held(self) -> Optional[int]:
        """What is held now; None if this system does not say."""
        gc.collect()
        if self.source == "allocator":
            torch.cuda.synchronize(self.device)
            return torch.cuda.memory_allocated(self.device)
        if self.source == "tensors":
            return None
        _trim()
        return _status("RssAnon")

    def mark(self) -> None:
        """Peaks count from here."""
        if self.source == "allocator":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.source == "process":
            with contextlib.suppress(OSError):  # some containers have no such file: then there is no peak
                Path("/proc/self/clear_refs").write_text("5")
                self._files = (_status("VmRSS") or 0) - (_status("RssAnon") or 0)

    def peak(self) -> Optional[int]:
        """The most that was held since `mark`; None if this system does not say."""
        if self.source == "allocator":
            return torch.cuda.max_memory_allocated(self.device)
        return None if self._files is None else (_status("VmHWM") or 0) - self._files


def _status(name: str) -> Optional[int]:
    """A figure of /proc/self/status in bytes (Linux)."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def _trim() -> None:
    """Give freed pages of the C heap back, so that they do not count as held."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def batch_of(config: Config, vocab: int) -> Batch:
    """A micro-batch of random inputs and labels."""
    inputs, labels = blank_batch(config, config.batch.micro)
    draw = np.random.RandomState(0)
    if config.model.kind == "mlp":
        return draw.rand(*inputs.shape).astype(inputs.dtype), draw.randint(0, vocab, labels.shape).astype(labels.dtype)
    answers = expected_classes(config) if config.model.head == "classifier" else vocab
    tokens, classes = draw.randint(0, vocab, inputs.shape), draw.randint(0, answers, labels.shape)
    return tokens.astype(inputs.dtype), classes.astype(labels.dtype)


def engine_of(config: Config, vocab: int) -> TorchEngine:
    """The engine that `train` uses; on CPU without a compiler, which would leave memory of its own behind in this process."""
    world = World.current(config)
    engine = make_engine(build_model(config, vocab), config, world)
    assert isinstance(engine, TorchEngine)
    if isinstance(engine.optimizer, AnyPrecisionAdamW) and world.device.type == "cpu":
        engine.optimizer.compiled = False
    return engine


def measure(config: Config, vocab: int) -> Dict[str, Any]:
    """Bytes by kind, as `Footprint` names them, and `held`: what all of it came to for process or allocator; `other`: what of it
    is none of these tensors."""
    torch.manual_seed(0)
    _warm_up(config, vocab)
    meter = Meter(World.current(config).device)
    base = meter.held()
    engine, batch = engine_of(config, vocab), batch_of(config, vocab)
    weights = meter.held()
    gradients = _first_update(engine, batch)
    held = meter.held()
    meter.mark()
    engine.train_step(batch)
    peak = meter.peak()
    kinds = _by_kind(engine)
    found: Dict[str, Any] = {**kinds, "gradients": gradients, "source": meter.source, "parameters": _count(engine), "other": 0}
    if base is None or weights is None or held is None:
        found["held"] = sum(kinds.values()) + gradients
    else:
        found["held"] = held - base + (gradients if engine.fused is not None else 0)
        found["other"] = found["held"] - sum(kinds.values()) - gradients
        found["held_weights"] = weights - base
        found["peak"] = None if peak is None else peak - base
    found.update(_activations(engine, batch))
    return found


def _warm_up(config: Config, vocab: int) -> None:
    """An update of the same network, all of which is freed: what libraries keep for its shapes (code, plans) is then there."""
    engine = engine_of(config, vocab)
    engine.train_step(batch_of(config, vocab))
    engine.close()


def _count(engine: TorchEngine) -> int:
    return sum(parameter.numel() for parameter in engine.model.parameters())


def _first_update(engine: TorchEngine, batch: Batch) -> int:
    """The most bytes of gradients that were alive; after it they are as the engine leaves them."""
    parameters = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]

    def alive() -> int:
        return sum(_size(parameter.grad) for parameter in parameters if parameter.grad is not None)

    most = [0]
    if engine.fused is not None:
        measure_norm = engine.fused.measure

        def watch(gradient: torch.Tensor) -> Any:
            most[0] = max(most[0], alive())
            return measure_norm(gradient)

        engine.fused.measure = watch
        engine.train_step(batch)
        engine.fused.measure = measure_norm
        return most[0]
    engine.train_step(batch)
    return alive()


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _by_kind(engine: TorchEngine) -> Dict[str, int]:
    """Bytes of weights, moments and compensation, each storage once."""
    states = list(engine.optimizer.state.values())
    kinds = {
        "weights": list(engine.model.parameters()),
        "moments": [state[key] for state in states for key in _MOMENTS if torch.is_tensor(state.get(key))],
        "compensation": [state[key] for state in states for key in _KEPT if torch.is_tensor(state.get(key))],
    }
    return {name: _storages(tensors) for name, tensors in kinds.items()}


def _storages(tensors: List[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _activations(engine: TorchEngine, batch: Batch) -> Dict[str, Optional[int]]:
    """Peaks of copies of weights and of all other activations in a forward and backward pass, by following tensors."""
    if TORCH < (2, 1):
        return {"activations": None, "copies": None}
    parameters = [parameter for parameter in engine.wrapped.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    rows = engine._tensors(batch)
    held = [*parameters, *(parameter.grad for parameter in parameters), *engine.wrapped.buffers(), *rows]
    with Alive(held, parameters) as alive:
        with autocast(engine.config.precision, engine.world.device.type):
            loss, _ = engine.wrapped(*rows)
        loss.backward()
    for parameter in parameters:
        parameter.grad = None
    return {"activations": alive.peak - alive.copies_then, "copies": alive.copies_peak}


def main(stream: Any = None) -> int:
    """One measurement."""
    order = json.load(stream or sys.stdin)
    config = load_config(order["config"])
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    sys.stdout.write(json.dumps(measure(config, order["vocab"])) + "\n")  # the last line is what the parent reads
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
