"""Every source of randomness in a process, captured and put back exactly (Python, numpy, torch, CUDA)."""

from __future__ import annotations

import base64
import random
from typing import Any, Dict

import numpy as np
import torch


def seed_all(seed: int, rank: int) -> None:
    """Seed this process; ranks draw different dropout, and rank 0 draws what a single process draws."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def capture(device: torch.device) -> Dict[str, Any]:
    """The state of all generators, as plain JSON."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": [version, list(words), gauss],
        "numpy": [name, _text(keys.tobytes()), int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
    }
    if device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(device).numpy().tobytes())
    return state


def restore(state: Dict[str, Any], device: torch.device) -> None:
    """Put back what `capture` returned; a CUDA state is left out on another kind of device."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.frombuffer(_raw(keys), np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_tensor(state["cuda"]), device)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _raw(text: str) -> bytes:
    return base64.b64decode(text)


def _tensor(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(_raw(text), np.uint8).copy())
