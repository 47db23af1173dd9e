"""Every reversible stack of ours beside plain autograd and its peers: peak memory, step time, gradient error, conditioning.

    python benchmarks/reversible.py                       # the full measurement, about a quarter of an hour
    python benchmarks/reversible.py --quick               # small shapes, no claims about time
    python benchmarks/reversible.py --only conditioning   # gradient errors measured beside predicted
    python benchmarks/reversible.py --only levers         # what the keys of `memory:` save

Memory and time: embedding, stack and mean square of its output, forward and backward, without parameters and gradients. Peers run
the same branches. By formula, with S = batch * seq * width * 4 bytes: a reversible peak is about 5 S (input, streams, their
gradients) and what one branch needs. Peers: `pip install ipu_lean[bench]` and `pip install --no-deps memcnn`; one that is not
there is left out, which the output says.
"""
from __future__ import annotations

import argparse
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from _common import SECOND_RUN, Claims, LiveBytes, Remote, parameters_and_gradients, table, timed_apart, timed_in_turn
from _levers import lever_rows, table_rows
from _reversible_peers import ResizedBytes, peers, revlib_momentum
from torch import nn
from train_step import VOCAB, Step, stack_step, tokens_of

from ipu_lean.conditioning import BFLOAT16, Stack, amplification, gradient_error
from ipu_lean.config import derived, load_config
from ipu_lean.models import build_model

DEPTHS = (6, 24)  # between these the peak must not grow
FULL = {"width": 256, "heads": 4, "seq": 512, "batch": 8, "depth": 12, "rounds": 5}
QUICK = {"width": 64, "heads": 2, "seq": 128, "batch": 2, "depth": 12, "rounds": 2}
VARIANTS: Dict[str, Dict[str, Any]] = {
    "additive": {},
    "additive aaff": {"order": "aaff"},
    "additive, zeros": {"input": "zeros"},
    "additive, split": {"input": "split"},
    "additive, concat": {"output": "concat"},
    "additive, gate": {"output": "gate-channels"},
    "additive, exact": {"exact": True},
    "momentum 0.9": {"coupling": "momentum"},
    "momentum 0.99": {"coupling": "momentum", "beta": 0.99},
    "momentum 0.9 aaff, out y": {"coupling": "momentum", "order": "aaff", "output": "y"},
    "modified momentum 0.9": {"coupling": "modified-momentum"},
    "modified momentum 0.9, out y": {"coupling": "modified-momentum", "output": "y"},
    "mean": {"coupling": "mean"},
    "mean, global index": {"coupling": "mean", "index": "global"},
    "affine": {"coupling": "affine"},
}
TIMED = ("additive", "additive, exact", "momentum 0.9", "mean")
REVERSIBLE_PEERS = ("revlib", "memcnn", "Hugging Face Reformer layers")
PARTS = ("memory", "levers", "error", "conditioning", "revlib", "time")
CONDITIONED = ("additive", "mean", "mean, global index", "affine", "momentum 0.9", "momentum 0.99", "modified momentum 0.9")


def gpt(size: Dict[str, Any], depth: int, variant: str) -> nn.Module:
    """Our GPT, as in train_step.py; nothing starts at zero, embeddings have unit size."""
    text = f"""
        model: {{width: {size["width"]}, depth: {depth}, heads: {size["heads"]}, seq: {size["seq"]}, positions: learned,
                 tied: false}}
        mup: {{parametrization: standard, embedding_mult: 10.0}}
        memory: {{allow_ill_conditioned: true}}
    """
    stack = [f"model.stack.{key}={str(value).lower()}" for key, value in VARIANTS[variant].items()]
    return build_model(load_config(text, stack), VOCAB)


def step_of(model: nn.Module, how: str, tokens: torch.Tensor, precision: str = "fp32") -> Step:
    """A step with one of our engines (`store`, `invert`), or with a peer over the model's branches."""
    if how in ("store", "invert"):
        model.layers.engine = how
        return stack_step(model, model.stack, tokens, precision)
    branches: List[nn.Module] = [branch for block in model.layers.executed() for branch in block.branches]
    return stack_step(model, peers(branches)[how], tokens, precision)


def peak_of(model: nn.Module, how: str, tokens: torch.Tensor) -> float:
    """Most bytes alive at once in a step, in 1e6."""
    step = step_of(model, how, tokens)
    counter = ResizedBytes if how == "memcnn" else LiveBytes
    with counter(parameters_and_gradients(model) + list(model.buffers())) as live:
        step()
    return live.peak / 1e6


def measure_memory(size: Dict[str, Any], claims: Claims) -> Tuple[Dict[str, Any], Dict[str, float]]:
    """(peaks of each variant of ours, plain and inverted, at the main depth and by depth; peaks of the peers)."""
    tokens, _ = tokens_of(size)
    ours: Dict[str, Any] = {}
    for name in VARIANTS:
        model = gpt(size, size["depth"], name)
        ours[name] = {"plain": peak_of(model, "store", tokens), "inverted": peak_of(model, "invert", tokens)}
        for depth in DEPTHS:
            ours[name][f"inverted, {depth} layers"] = peak_of(gpt(size, depth, name), "invert", tokens)
        shallow, deep = (ours[name][f"inverted, {depth} layers"] for depth in DEPTHS)
        claims.at_most(f"{name}: growth of the peak over layers", deep / shallow - 1, 0.02)
        claims.at_most(f"{name}: inverted peak / plain peak", ours[name]["inverted"] / ours[name]["plain"], 0.25)
    model = gpt(size, size["depth"], "additive")
    branches = [branch for block in model.layers.executed() for branch in block.branches]
    theirs = {name: peak_of(model, name, tokens) for name in peers(branches)}
    for name, peak in theirs.items():
        claims.at_most(f"our peak / that of {name}", ours["additive"]["inverted"] / peak, 1.0)
    return ours, theirs


def gradients_of(model: nn.Module, how: str, tokens: torch.Tensor, precision: str = "fp32") -> Dict[str, torch.Tensor]:
    """By name; a key's bias has no true gradient, and the last branch of an unread stream none at all."""
    model.zero_grad()
    step_of(model, how, tokens, precision)()
    named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and "key.linear.bias" not in name}
    return {name: gradient for name, gradient in named.items() if gradient.norm() > 0}


def worst(reference: Dict[str, torch.Tensor], found: Dict[str, torch.Tensor]) -> float:
    """Largest |u - v| / |u|."""
    return max(((u - found[name]).norm() / u.norm()).item() for name, u in reference.items())


def measure_error(size: Dict[str, Any], claims: Claims) -> Dict[str, float]:
    """Gradient error of each inverted variant and of each peer against the same stack under plain autograd, fp32."""
    tokens, _ = tokens_of(size)
    found: Dict[str, float] = {}
    for name in VARIANTS:
        model = gpt(size, size["depth"], name)
        found[name] = worst(gradients_of(model, "store", tokens), gradients_of(model, "invert", tokens))
        claims.at_most(f"{name}: gradient error", found[name], 0.0 if name.endswith("exact") else 1e-3)
    model = gpt(size, size["depth"], "additive")
    reference = gradients_of(model, "store", tokens)
    for name in peers([branch for block in model.layers.executed() for branch in block.branches]):
        found[name] = worst(reference, gradients_of(model, name, tokens))
    claims.at_most("our gradient error / the best reversible peer's", found["additive"] / _best(found), 1.5)
    return found


def _best(errors: Dict[str, float]) -> float:
    return min(error for name, error in errors.items() if name in REVERSIBLE_PEERS)


def measure_conditioning(claims: Claims) -> List[Dict[str, Any]]:
    """Worst gradient error by depth and precision beside the prediction, at a small width (errors do not depend on it)."""
    small, rows = {"width": 64, "heads": 2, "seq": 32, "batch": 4}, []
    tokens, _ = tokens_of(small)
    for name in CONDITIONED:
        for precision, half in (("fp32", None), ("bf16-mixed", BFLOAT16)):
            for depth in (6, 12, 24, 48):
                model = gpt(small, depth, name)
                plain = gradients_of(model, "store", tokens, precision)
                error = worst(plain, gradients_of(model, "invert", tokens, precision))
                described = described_by(model, name, depth, tokens)
                predicted = gradient_error(described, half)
                own: Optional[float] = worst(gradients_of(model, "store", tokens), plain) if half else None
                rows.append(
                    {
                        "variant": name,
                        "precision": precision,
                        "layers": depth,
                        "amplification": amplification(described),
                        "predicted": min(predicted, 1.0),
                        "measured": error,
                        "own": own,
                    }
                )
                if half is None and max(error, predicted) > 1e-6 and min(error, predicted) < 1:
                    ratio = max(min(error, 1.0) / min(predicted, 1.0), min(predicted, 1.0) / min(error, 1.0))
                    claims.at_most(f"{name}, {depth} layers: measured and predicted error differ by a factor of", ratio, 8.0)
    return rows


def described_by(model: nn.Module, name: str, depth: int, tokens: torch.Tensor) -> Stack:
    """The stack as conditioning.py sees it, with the size of a branch's output measured."""
    text = "mup: {parametrization: standard}\nmemory: {engine: store}"
    section = load_config(text, [f"model.stack.{key}={value}" for key, value in VARIANTS[name].items()]).model.stack
    sizes: List[float] = []
    width = model.spec.stack_width
    hooks = [
        branch.register_forward_hook(lambda _, __, out: sizes.append(float(out[..., -width:].pow(2).mean().sqrt())))
        for block in model.layers.blocks
        for branch in block.branches
    ]
    with torch.no_grad():
        x0 = model.embed(tokens)
        model.stack(x0)
    for hook in hooks:
        hook.remove()
    return Stack(
        section.coupling,
        2 * depth,
        derived.beta(section),
        section.index,
        derived.stack_input(section),
        sum(sizes) / len(sizes) / float(x0.pow(2).mean().sqrt()),
    )


def measure_revlib(claims: Claims) -> List[Dict[str, Any]]:
    """Gradient errors of momentum stacks, beta 0.9: revlib's function mode against its plain mode, and ours against `store`."""
    small, rows = {"width": 64, "heads": 2, "seq": 32, "batch": 4}, []
    tokens, _ = tokens_of(small)
    for depth in (2, 12, 24):
        for precision in ("fp32", "bf16-mixed"):
            model = gpt(small, depth, "momentum 0.9")
            branches = [branch for block in model.layers.executed() for branch in block.branches]
            row: Dict[str, Any] = {"layers": depth, "precision": precision}
            row["ours"] = worst(*(gradients_of(model, how, tokens, precision) for how in ("store", "invert")))
            for kind in ("pair", "momentum_net"):
                found = []
                for mode in ("no_savings", "autograd_function"):
                    model.zero_grad()
                    stack_step(model, revlib_momentum(branches, kind, mode), tokens, precision)()
                    found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
                named = {n: g for n, g in found[0].items() if g.norm() > 0 and "key.linear.bias" not in n}
                row[f"revlib {kind}"] = worst(named, found[1])
            rows.append(row)
            best = min(row["revlib pair"], row["revlib momentum_net"])
            if depth > 2:
                claims.at_most(f"{depth} layers, {precision}: our momentum's gradient error / revlib's", row["ours"] / best, 1.5)
    return rows


def build_step(size: Dict[str, Any], variant: str, how: str) -> Step:
    """Made in the process that runs it."""
    tokens, _ = tokens_of(size)
    model = gpt(size, size["depth"], variant)
    parameters_and_gradients(model)
    return step_of(model, how, tokens)


def measure_time(size: Dict[str, Any], rounds: int, claims: Claims, quick: bool, apart: bool) -> Dict[str, Any]:
    """A step's CPU time by that of the same stack under plain autograd, all in turn.

    In one process, the large heap of a plain step pays for fresh pages after the others' small ones. With `apart` each step has
    its own process, and plain steps find their pages again: what is left is the second run, 4/3 of the operations.
    """
    model = gpt(size, 1, "additive")
    names = list(peers([branch for block in model.layers.executed() for branch in block.branches]))
    cases = [(name, how) for name in TIMED for how in ("store", "invert")] + [("additive", name) for name in names]
    if apart:
        timings = timed_apart({f"{name}: {how}": Remote(build_step, size, name, how) for name, how in cases}, rounds)
    else:
        timings = timed_in_turn({f"{name}: {how}": build_step(size, name, how) for name, how in cases}, rounds)
    found: Dict[str, Any] = {}
    for name in TIMED:
        mine, plain = timings[f"{name}: invert"], timings[f"{name}: store"]
        found[name] = {**mine.median(), "by_plain": mine.ratio_to(plain)}
        if not quick:
            claims.at_most(f"{name}: inverted step / plain step", found[name]["by_plain"], SECOND_RUN)
    for name in names:
        theirs = timings[f"additive: {name}"]
        found[name] = {**theirs.median(), "by_plain": theirs.ratio_to(timings["additive: store"])}
        if not quick and name in REVERSIBLE_PEERS:
            claims.at_least(f"{name}: its step / our inverted step", theirs.ratio_to(timings["additive: invert"]), 1.0)
    return found


def show(result: Dict[str, Any]) -> None:
    """The tables."""
    if result.get("memory_mb"):
        ours, theirs = result["memory_mb"]
        rows = [[name, p["plain"], p["inverted"], p["plain"] / p["inverted"]] for name, p in ours.items()]
        rows += [[name, ours["additive"]["plain"], peak, ours["additive"]["plain"] / peak] for name, peak in theirs.items()]
        print(f"\nPeak MB\n{table(['variant', 'plain', 'inverted', 'plain / it'], rows)}")
    if result.get("gradient_error"):
        rows = [[name, f"{error:.1e}"] for name, error in result["gradient_error"].items()]
        print(f"\nGradient error, fp32\n{table(['variant', 'error'], rows)}")
    if result.get("conditioning"):
        rows = [
            [f"{row['variant']}, {row['precision']}", row["layers"]]
            + ["-" if row[key] is None else f"{row[key]:.1e}" for key in ("amplification", "predicted", "measured", "own")]
            for row in result["conditioning"]
        ]
        headings = ["variant", "layers", "amplification", "predicted", "measured", "precision's own"]
        print(f"\nWorst gradient error of inverting\n{table(headings, rows)}")
    if result.get("revlib_momentum"):
        names = [name for name in result["revlib_momentum"][0] if name not in ("layers", "precision")]
        rows = [
            [f"{row['layers']} layers, {row['precision']}"] + [f"{row[name]:.1e}" for name in names]
            for row in result["revlib_momentum"]
        ]
        print(f"\nWorst gradient error of momentum stacks, beta 0.9\n{table(['stack'] + names, rows)}")
    if result.get("seconds"):
        rows = [[name, t["wall"], t["cpu"], t["by_plain"]] for name, t in result["seconds"].items()]
        print(f"\nSeconds a step (medians)\n{table(['variant', 'wall', 'CPU', 'by plain'], rows)}")
    print()


def main(arguments: Sequence[str]) -> int:
    """Measures, prints, and returns 0 if every claim holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes; no claims about time")
    parser.add_argument("--rounds", type=int, help="rounds of timing (default 5, quick 2)")
    parser.add_argument("--apart", action="store_true", help="time each step in its own process (its own heap)")
    parser.add_argument("--only", choices=PARTS, help="one part of the measurement")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    size, claims = QUICK if options.quick else FULL, Claims()
    wanted = (options.only,) if options.only else PARTS
    result: Dict[str, Any] = {"benchmark": "reversible", "torch": torch.__version__, "size": size}
    if "memory" in wanted:
        result["memory_mb"] = measure_memory(size, claims)
    if "levers" in wanted:
        result["levers"] = lever_rows(claims)
        print(f"\nMemory levers, 8 x 1024 tokens\n{table(['variant', 'peak MB', '/ invert'], table_rows(result['levers']))}")
    if "error" in wanted:
        result["gradient_error"] = measure_error(size, claims)
    if "conditioning" in wanted:
        result["conditioning"] = measure_conditioning(claims)
    if "revlib" in wanted:
        result["revlib_momentum"] = measure_revlib(claims)
    if "time" in wanted:
        result["seconds"] = measure_time(size, options.rounds or size["rounds"], claims, options.quick, options.apart)
    show(result)
    return claims.finish(result)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
