"""What a step on an IPU keeps for its backward pass, from 4 to 32 layers: `memory.ipu_backward` recompute beside surrogate.

    python benchmarks/ipu_reversible.py            # about a minute
    python benchmarks/ipu_reversible.py --quick    # a small model, a few seconds

Counted from the traced graph as PopART would keep it (ipu/emulator/kept.py), and measured: bytes of tensors that are really alive
on the emulated device when the forward pass of a micro-batch is over. The emulator does not recompute, so for `recompute` what is
measured is the step that stores everything; it stands beside the count for that, and so checks the counter.
"""
from __future__ import annotations

import argparse
import sys
from typing import Any, Dict, List, Tuple

import torch
from _common import Claims, LiveBytes, table

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.config import Config, load_config
from ipu_lean.ipu import make_optimizer, make_options, make_step, place
from ipu_lean.ipu.emulator.examine import examine
from ipu_lean.ipu.emulator.kept import Kept, kept_for_backward
from ipu_lean.models import build_meta, build_model

VOCAB = 257
DEPTHS = (4, 8, 16, 32)
MB = 1e6
TEXT = """
device: ipu-emulated
model: {{width: {width}, depth: {depth}, heads: 4, seq: {seq}}}
mup: {{base_width: {width}}}
batch: {{micro: {micro}}}
memory: {{ipu_backward: {mode}}}
ipu: {{recompute_checkpoint_every_layer: {recompute}}}
"""


def configured(size: Dict[str, int], depth: int, mode: str, recompute: bool = True) -> Config:
    return load_config(TEXT.format(**size, depth=depth, mode=mode, recompute="true" if recompute else "false"))


def tokens(config: Config, device: str) -> Tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of one micro-batch."""
    shape = (config.batch.micro, config.model.seq)
    made = torch.zeros(shape, dtype=torch.int32, device=device) if device == "meta" else torch.randint(
        0, VOCAB, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return made, made


def counted(config: Config) -> Kept:
    """From the graph, without memory for weights."""
    model = build_meta(config, VOCAB)
    step, placement = make_step(model, config, poptorch), place(model, config, poptorch)
    options = make_options(config, poptorch).train
    report = examine(step, tokens(config, "meta"), options=options)
    assert report.violations == [], report.violations
    placement.remove()
    return kept_for_backward(report.trace, options)


def measured(config: Config) -> int:
    """Bytes of tensors made in the forward pass of one micro-batch and alive at its end."""
    model = build_model(config, VOCAB)
    step, placement = make_step(model, config, poptorch), place(model, config, poptorch)
    executor = poptorch.trainingModel(step, make_options(config, poptorch).train, make_optimizer(model, config, poptorch))
    batch = tokens(config, "cpu")
    executor.compile(*batch)
    executable = executor._executable
    constants = [value for value in vars(executable.graph).values() if isinstance(value, torch.Tensor)]
    there = [*executable.parameters.values(), *executable.buffers[0].values(), *executable.graph.buffers(), *constants]
    with torch.enable_grad(), LiveBytes(there) as live:
        loss = executable._micro(0, 0, 0, [[tensor] for tensor in batch])[0]
        alive = live.now
    assert loss.requires_grad
    executor.destroy()
    placement.remove()
    return alive


def parameter_bytes(config: Config) -> int:
    return sum(4 * parameter.numel() for parameter in build_meta(config, VOCAB).parameters())


def rows(size: Dict[str, int]) -> List[Dict[str, Any]]:
    """One row for each mode and depth; megabytes are printed, bytes kept."""
    found = []
    for mode in ("recompute", "surrogate"):
        for depth in DEPTHS:
            config = configured(size, depth, mode)
            kept = counted(config)
            found.append({"mode": mode, "layers": depth, "activations": kept.activations, "recomputed": kept.recomputed,
                          "gradients": sum(kept.gradients.values()), "forward": kept.forward,
                          "parameters": parameter_bytes(config)})
    return found


def check_counter(size: Dict[str, int], claims: Claims) -> List[Dict[str, Any]]:
    """The count beside what is alive, for the two modes that the emulator really runs."""
    found = []
    for mode in ("surrogate", "store"):
        for depth in (DEPTHS[0], DEPTHS[-1]):
            config = configured(size, depth, "surrogate" if mode == "surrogate" else "recompute", recompute=False)
            kept = counted(config)
            count, alive = kept.activations + sum(kept.gradients.values()), measured(config)
            found.append({"mode": mode, "layers": depth, "counted": count, "measured": alive})
            claims.at_most(f"{mode}, {depth} layers: counted and alive differ relatively by", abs(alive - count) / alive, 1e-3)
    return found


def judge(found: List[Dict[str, Any]], claims: Claims, size: Dict[str, int]) -> None:
    by_depth = {mode: [row for row in found if row["mode"] == mode] for mode in ("recompute", "surrogate")}
    first, last = by_depth["surrogate"][0], by_depth["surrogate"][-1]
    claims.at_most("surrogate: kept activations, 32 layers by 4", last["activations"] / first["activations"], 1.0)
    claims.at_most("surrogate: most alive in the forward pass, 32 layers by 4", last["forward"] / first["forward"], 1.0)
    claims.at_most("surrogate: gradients by parameters, 32 layers", last["gradients"] / last["parameters"], 1.0)
    kept = [row["activations"] for row in by_depth["recompute"]]
    slopes = [(after - before) / (deep - shallow) for before, after, shallow, deep in zip(kept, kept[1:], DEPTHS, DEPTHS[1:])]
    stream = 4 * size["micro"] * size["seq"] * size["width"]
    claims.at_least("recompute: growth a layer, in streams", min(slopes) / stream, 1.99)
    claims.at_most("recompute: growth a layer differs between depths by", max(slopes) / min(slopes) - 1, 0.01)
    claims.at_most("kept activations at 32 layers, surrogate by recompute", last["activations"] / kept[-1], 0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    size = {"width": 32, "seq": 32, "micro": 2} if given.quick else {"width": 128, "seq": 256, "micro": 4}
    found, claims = rows(size), Claims()
    names = ("activations", "recomputed", "gradients", "forward", "parameters")
    print(f"one micro-batch of {size['micro']} x {size['seq']} tokens, width {size['width']}, fp32; MB counted in the trace")
    print(table(("mode", "layers", "kept", "+ recomputed", "gradient copies", "most in forward", "parameters"),
                [(row["mode"], row["layers"], *(row[name] / MB for name in names)) for row in found]))
    judge(found, claims, size)
    checked = check_counter(size, claims)
    print(table(("emulated", "layers", "counted MB", "alive MB"),
                [(row["mode"], row["layers"], row["counted"] / MB, row["measured"] / MB) for row in checked]))
    return claims.finish({"benchmark": "ipu_reversible", "size": size, "rows": found, "checked": checked})


if __name__ == "__main__":
    sys.exit(main())
