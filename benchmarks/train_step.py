"""One training step: time and peak activation memory of the reversible GPT beside plain autograd and its peers.

    python benchmarks/train_step.py            # the full measurement, about a quarter of an hour
    python benchmarks/train_step.py --quick    # small shapes, a few seconds, no claims about time

Memory: embedding output, stack and mean-square loss, forward and backward; parameters and gradients are not counted. By formula,
with S = batch * seq * width * 4 bytes (one stream), A the activations of one layer and f the most that one branch needs in its
backward pass: plain ~ layers * A, reversible ~ 5 S (input, streams, their gradients) + f. Time: that step; and, beside Hugging
Face's GPT-2 of equal size, the whole language-model step without the optimizer. Peers: `pip install ipu_lean[bench]`.
"""
from __future__ import annotations

import argparse
import sys
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
from _common import SECOND_RUN, Claims, LiveBytes, Remote, Timing, parameters_and_gradients, table, timed_apart, timed_in_turn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ipu_lean.config import load_config
from ipu_lean.models import TrainStep, build_model

FULL = {"width": 256, "heads": 4, "seq": 512, "batch": 8, "depth": 12, "depths": (6, 12, 24, 48), "rounds": 5}
QUICK = {"width": 64, "heads": 2, "seq": 128, "batch": 2, "depth": 12, "depths": (6, 12, 24), "rounds": 2}
VOCAB = 257
Step = Callable[[], Any]


def gpt(size: Dict[str, Any], depth: int, attention: str) -> nn.Module:
    """Our GPT with GPT-2's choices (learned positions, GELU, tied readout); nothing starts at zero, embeddings have unit size."""
    text = f"""
        model: {{width: {size["width"]}, depth: {depth}, heads: {size["heads"]}, seq: {size["seq"]}, positions: learned,
                 attention: {attention}}}
        mup: {{base_width: {size["width"]}, query_zero_init: false, readout_zero_init: false, embedding_mult: 10.0}}
    """
    return build_model(load_config(text), VOCAB)


def hugging_face(size: Dict[str, Any], depth: int, attention: str) -> nn.Module:
    """GPT-2 of the same size, without dropout, with the fused or the explicit attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=size["seq"],
        n_embd=size["width"],
        n_layer=depth,
        n_head=size["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa" if attention == "fused" else "eager",
        use_cache=False,
    )
    return GPT2LMHeadModel(config).train()


# How the stack's backward pass gets what it needs. Each takes the branches and x [batch, seq, width].


def half_steps(branches: Sequence[nn.Module], a: Tensor, b: Tensor) -> Tuple[Tensor, Tensor]:
    """(a, b) -> (b, a + f(b)) for each branch, by plain autograd."""
    for branch in branches:
        a, b = b, a + branch(b)
    return a, b


def torch_checkpoint(every: int) -> Callable[[Sequence[nn.Module], Tensor], Tensor]:
    """torch.utils.checkpoint (not re-entrant) around every `every` branches."""

    def run(branches: Sequence[nn.Module], x: Tensor) -> Tensor:
        a = b = x
        for first in range(0, len(branches), every):
            a, b = checkpoint(half_steps, branches[first : first + every], a, b, use_reentrant=False)
        return a + b - x

    return run


def revlib_function(branches: Sequence[nn.Module]) -> Callable[[Tensor], Tensor]:
    """revlib's fastest and smallest mode, called without the copies that its split and concatenation would make."""
    import revlib

    modules = revlib.ReversibleSequential(*branches, memory_mode=revlib.MemoryModes.autograd_function)

    def run(x: Tensor) -> Tensor:
        zeros = torch.zeros_like(x)
        state = (x, x, zeros, zeros)
        for module in modules:
            state = module(state)
        a, b = modules.replace_grad(*state)
        return a + b - x

    return run


def stacks(model: nn.Module, peers: bool = True) -> Dict[str, Callable[[Tensor], Tensor]]:
    """Every way to run the model's stack, on the same branches."""
    branches: List[nn.Module] = [branch for block in model.layers.executed() for branch in block.branches]

    def ours(engine: str) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            model.layers.engine = engine
            return model.stack(x)

        return run

    found = {"plain": ours("store"), "reversible": ours("invert"), "checkpoint (ours, per layer)": ours("checkpoint")}
    if peers:
        found["torch checkpoint per layer"] = lambda x: torch_checkpoint(2)(branches, x)
        found["torch checkpoint per sublayer"] = lambda x: torch_checkpoint(1)(branches, x)
        found["revlib function mode"] = revlib_function(branches)
    return found


def precision_context(precision: str) -> torch.autocast:
    """Autocast for bf16-mixed, nothing for fp32."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed")


def tokens_of(size: Dict[str, Any]) -> Tuple[Tensor, Tensor]:
    """(tokens, labels), each [batch, seq]."""
    text = torch.randint(0, VOCAB, (size["batch"], size["seq"] + 1), generator=torch.Generator().manual_seed(0))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def stack_step(model: nn.Module, run: Callable[[Tensor], Tensor], tokens: Tensor, precision: str) -> Step:
    """Embedding, stack, mean square; forward and backward."""

    def step() -> None:
        with precision_context(precision):
            out = run(model.embed(tokens))
        out.float().pow(2).mean().backward()

    return step


def peak_megabytes(model: nn.Module, run: Callable[[Tensor], Tensor], tokens: Tensor, precision: str) -> float:
    """Most bytes alive at once in a step, in 1e6."""
    step = stack_step(model, run, tokens, precision)
    with LiveBytes(parameters_and_gradients(model) + list(model.buffers())) as live:
        step()
    assert live.now == 0, "a step leaves nothing alive"
    return live.peak / 1e6


def measure_memory(size: Dict[str, Any], claims: Claims, quick: bool) -> Dict[str, Any]:
    """Peaks by attention, precision and variant at the main depth, and of the savers over all depths (fp32)."""
    tokens, _ = tokens_of(size)
    found: Dict[str, Any] = {}
    for attention, factor in (("fused", 9.0), ("explicit", 8.0)):
        model = gpt(size, size["depth"], attention)
        for precision in ("fp32", "bf16-mixed"):
            peaks = {name: peak_megabytes(model, run, tokens, precision) for name, run in stacks(model).items()}
            found[f"{attention} {precision}"] = peaks
            if precision == "fp32":
                ratio = peaks["plain"] / peaks["reversible"]
                claims.at_least(f"{attention}: plain peak / reversible peak", ratio, 0.5 * factor if quick else factor)
                ratio = peaks["reversible"] / peaks["revlib function mode"]
                claims.at_most(f"{attention}: reversible peak / revlib's", ratio, 1.0)
        depths = {}
        for depth in size["depths"]:
            model = gpt(size, depth, attention)
            runs = stacks(model)
            depths[depth] = {
                name: peak_megabytes(model, runs[name], tokens, "fp32") for name in ("reversible", "revlib function mode")
            }
        found[f"{attention} fp32 by depth"] = depths
        ours = [peaks["reversible"] for peaks in depths.values()]
        claims.at_most(f"{attention}: growth of the reversible peak over depths", max(ours) / min(ours) - 1, 0.02)
    return found


def measure_error(size: Dict[str, Any], claims: Claims) -> Dict[str, float]:
    """Largest |u - v| / |u| over parameters between gradients of the fused model by engine and precision (keys: u, then v)."""
    tokens, _ = tokens_of(size)
    model = gpt(size, size["depth"], "fused")
    # A key's bias moves all scores of a query alike, so its true gradient is zero.
    named = [(name, p) for name, p in model.named_parameters() if not name.endswith("key.linear.bias")]
    found = {}
    for engine in ("plain", "reversible"):
        for precision in ("fp32", "bf16-mixed"):
            model.zero_grad()
            stack_step(model, stacks(model, peers=False)[engine], tokens, precision)()
            found[engine, precision] = {name: p.grad.clone() for name, p in named if p.grad is not None}

    def distance(u: Tuple[str, str], v: Tuple[str, str]) -> float:
        return max(((found[u][n] - found[v][n]).norm() / found[u][n].norm()).item() for n in found[u])

    pairs = [
        (("plain", "fp32"), ("reversible", "fp32")),
        (("plain", "bf16-mixed"), ("reversible", "bf16-mixed")),
        (("plain", "fp32"), ("plain", "bf16-mixed")),
        (("plain", "fp32"), ("reversible", "bf16-mixed")),
    ]
    errors = {f"{' '.join(u)} to {' '.join(v)}": distance(u, v) for u, v in pairs}
    added = errors["plain fp32 to reversible bf16-mixed"] / errors["plain fp32 to plain bf16-mixed"]
    claims.at_most("gradient error of the reversible stack in fp32", errors["plain fp32 to reversible fp32"], 1e-6)
    claims.at_most("bf16-mixed: its distance from the fp32 gradient / the plain stack's", added, 1.2)
    return errors


def build_step(name: str, size: Dict[str, Any], attention: str, precision: str) -> Step:
    """One variant's step, made in the process that runs it."""
    tokens, labels = tokens_of(size)
    if name == "GPT-2 step, Hugging Face":
        peer = hugging_face(size, size["depth"], attention)
        parameters_and_gradients(peer)

        def gpt2() -> None:
            with precision_context(precision):
                loss = peer(input_ids=tokens, labels=tokens).loss
            loss.backward()

        return gpt2
    model = gpt(size, size["depth"], attention)
    parameters_and_gradients(model)
    if not name.startswith("GPT step"):
        return stack_step(model, stacks(model)[name], tokens, precision)
    model.layers.engine = "store" if name.endswith("plain") else "invert"
    whole = TrainStep(model)

    def language_model() -> None:
        with precision_context(precision):
            loss, _ = whole(tokens, labels)
        loss.backward()

    return language_model


def measure_time(size: Dict[str, Any], rounds: int, claims: Claims, quick: bool, apart: bool) -> Dict[str, Dict[str, Any]]:
    """Steps of all variants in turn, by attention and precision; with `apart`, each in its own process."""
    names = list(stacks(gpt(size, 1, "fused"))) + ["GPT step, plain", "GPT step, reversible", "GPT-2 step, Hugging Face"]
    found: Dict[str, Dict[str, Any]] = {}
    for attention in ("fused", "explicit"):
        for precision in ("fp32", "bf16-mixed"):
            if apart:
                timings = timed_apart({name: Remote(build_step, name, size, attention, precision) for name in names}, rounds)
            else:
                timings = timed_in_turn({name: build_step(name, size, attention, precision) for name in names}, rounds)
            found[f"{attention} {precision}"] = rows_of(timings)
            if not quick:
                time_claims(f"{attention} {precision}", timings, 1.15 if precision == "fp32" else 1.0, claims)
    return found


def rows_of(timings: Dict[str, Timing]) -> Dict[str, Any]:
    """Medians by name, and each step's CPU time by that of its plain partner."""
    partner = {name: "GPT step, plain" if name.startswith("GPT") else "plain" for name in timings}
    return {name: {**t.median(), "by_plain": t.ratio_to(timings[partner[name]])} for name, t in timings.items()}


def time_claims(case: str, timings: Dict[str, Timing], faster: float, claims: Claims) -> None:
    """What must hold of one attention kind and precision."""
    ours = timings["reversible"]
    claims.at_most(f"{case}: reversible step / plain step", ours.ratio_to(timings["plain"]), SECOND_RUN)
    claims.at_most(f"{case}: reversible step / revlib's", ours.ratio_to(timings["revlib function mode"]), 1.0)
    peer = timings["GPT-2 step, Hugging Face"].ratio_to(timings["GPT step, plain"])
    claims.at_least(f"{case}: GPT-2 of Hugging Face / our plain GPT", peer, faster)


def show(memory: Dict[str, Any], errors: Dict[str, float], times: Dict[str, Any]) -> None:
    """The tables."""
    if errors:
        rows = [[name, f"{error:.1e}"] for name, error in errors.items()]
        print(f"\nLargest relative gradient error\n{table(['from to', 'error'], rows)}")
    for case, peaks in memory.items():
        if "depth" in case:
            names = list(next(iter(peaks.values())))
            print(f"\nPeak MB, {case}\n{table(['layers'] + names, [[d] + [p[n] for n in names] for d, p in peaks.items()])}")
        else:
            rows = [[name, peak, peaks["plain"] / peak] for name, peak in peaks.items()]
            print(f"\nPeak MB, {case}\n{table(['variant', 'peak MB', 'plain / it'], rows)}")
    for case, found in times.items():
        rows = [[name, t["wall"], t["cpu"], t["by_plain"]] for name, t in found.items()]
        print(f"\nSeconds a step, {case} (medians)\n{table(['variant', 'wall', 'CPU', 'by plain'], rows)}")
    print()


def main(arguments: Sequence[str]) -> int:
    """Measures, prints, and returns 0 if every claim holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes; claims about memory only, at half their factor")
    parser.add_argument("--rounds", type=int, help="rounds of timing (default 5, quick 2)")
    parser.add_argument("--only", choices=("memory", "error", "time"), help="one part of the measurement")
    parser.add_argument("--apart", action="store_true", help="time each variant in its own process (its own heap)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    size = QUICK if options.quick else FULL
    claims = Claims()
    rounds, wanted = options.rounds or size["rounds"], (options.only,) if options.only else ("memory", "error", "time")
    memory = measure_memory(size, claims, options.quick) if "memory" in wanted else {}
    errors = measure_error(size, claims) if "error" in wanted else {}
    times = measure_time(size, rounds, claims, options.quick, options.apart) if "time" in wanted else {}
    show(memory, errors, times)
    result = {"benchmark": "train_step", "torch": torch.__version__, "size": size}
    return claims.finish({**result, "memory_mb": memory, "gradient_error": errors, "seconds": times})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
