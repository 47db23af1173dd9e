"""What the memory levers save: peaks of one training step of the GPT's stack at a sequence of 1024 tokens."""
from __future__ import annotations

from typing import Any, Callable, Dict, List

import torch
from _common import Claims, LiveBytes, parameters_and_gradients, timed_in_turn
from torch import nn

from ipu_lean.config import load_config
from ipu_lean.models import build_model

SIZE = {"width": 256, "heads": 4, "seq": 1024, "batch": 8, "depth": 4}
CHUNKS = "ffn_chunk: 512, attention_heads_at_once: 4"
MEMORY = {
    "store": "engine: store",
    "invert": "engine: invert",
    "invert, ffn_chunk 512": "engine: invert, ffn_chunk: 512",
    "invert, 4 heads at once": "engine: invert, attention_heads_at_once: 4",
    "invert, both": f"engine: invert, {CHUNKS}",
    "invert, both, 1 head at once": "engine: invert, ffn_chunk: 512, attention_heads_at_once: 1",
    "invert, keep_last 2": "engine: invert, keep_last: 2",
    "invert, both, keep_last 2": f"engine: invert, {CHUNKS}, keep_last: 2",
    "checkpoint": "engine: checkpoint",
    "checkpoint, both": f"engine: checkpoint, {CHUNKS}",
    "store, both": f"engine: store, {CHUNKS}",
}
BOUND = 0.60


def lever_rows(claims: Claims, rounds: int = 0, size: Dict[str, int] = SIZE) -> Dict[str, Dict[str, Dict[str, float]]]:
    """{attention: {name: {"peak_mb", "by_invert", and with rounds "seconds", "time_by_invert"}}}, fp32.

    Args:
        rounds: of timing, all in turn; 0 for none.
    """
    tokens = torch.randint(0, 257, (size["batch"], size["seq"]), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    found: Dict[str, Dict[str, Dict[str, float]]] = {}
    for attention in ("fused", "explicit"):
        models = {name: _model(size, attention, memory) for name, memory in MEMORY.items()}
        peaks = {name: _peak(model, tokens) for name, model in models.items()}
        rows = {name: {"peak_mb": peak, "by_invert": peak / peaks["invert"]} for name, peak in peaks.items()}
        claims.at_most(f"{attention}: peak with both levers / without", rows["invert, both"]["by_invert"], BOUND)
        if rounds:
            timings = timed_in_turn({name: _step(model, tokens) for name, model in models.items()}, rounds)
            for name, timing in timings.items():
                rows[name]["seconds"] = timing.median()["cpu"]
                rows[name]["time_by_invert"] = timing.ratio_to(timings["invert"])
        found[attention] = rows
    return found


def table_rows(found: Dict[str, Dict[str, Dict[str, float]]]) -> List[List[Any]]:
    """Rows for `_common.table`: attention, name, and the numbers."""
    return [[f"{attention}: {name}", *row.values()] for attention, rows in found.items() for name, row in rows.items()]


def _model(size: Dict[str, int], attention: str, memory: str) -> nn.Module:
    return build_model(
        load_config(
            f"""
            model: {{width: {size["width"]}, depth: {size["depth"]}, heads: {size["heads"]}, seq: {size["seq"]},
                     attention: {attention}}}
            memory: {{{memory}}}
            mup: {{base_width: {size["width"]}, query_zero_init: false, readout_zero_init: false, embedding_mult: 10.0}}
            """
        ),
        257,
    )


def _step(model: nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model.stack(model.embed(tokens)).pow(2).mean().backward()

    return step


def _peak(model: nn.Module, tokens: torch.Tensor) -> float:
    """Most bytes alive at once in a step beside parameters and gradients, in 1e6."""
    with LiveBytes(parameters_and_gradients(model) + list(model.buffers())) as live:
        _step(model, tokens)()
    assert live.now == 0, "a step leaves nothing alive"
    return live.peak / 1e6
