"""The Reformer's layers and the whole model beside Hugging Face's: time, memory, growth with length, and where LSH pays.

    python benchmarks/reformer.py            # everything, about five minutes on one core
    python benchmarks/reformer.py --quick    # short sequences, one round, no claims about time

One thread, equal weights and rotations, steps in turn, CPU time, medians. Layers: batch 1, width 256, 4 heads of 64, chunk 64,
causal, fp32; projections, attention and output projection, forward and backward. Memory: most bytes of tensors alive at once in
such a step. Model: six layers, local and LSH in turn, width 256, 2 heads of 64, ReLU, 320 pieces, axial positions, reversible;
one training step with the optimizer at 4096 tokens. Peer: `pip install transformers`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any, Dict, List, Sequence

import _reformer_layers as layers
import _reformer_model as models
import torch
from _common import Claims, LiveBytes, parameters_and_gradients, table, timed_in_turn

LENGTHS = (1024, 2048, 4096, 8192, 16384)
FASTER = {"local": 1.25, "LSH, 1 round": 1.3, "LSH, 2 rounds": 1.25, "LSH, 4 rounds": 1.25}
GROWTH = {"local": 2.2, "LSH, 1 round": 2.2, "LSH, 2 rounds": 2.6, "LSH, 4 rounds": 2.6}
MODEL_FASTER = 1.25
KEPT = "ours, last layer kept"
STARTED = time.perf_counter()


def say(text: str) -> None:
    """Progress, with the seconds since the start."""
    print(f"[{time.perf_counter() - STARTED:5.0f} s] {text}", flush=True)


def rounds_at(seq: int, options: argparse.Namespace) -> int:
    """More where a step is short."""
    if options.rounds:
        return options.rounds
    return 1 if options.quick else 9 if seq <= 2048 else 5 if seq <= 8192 else 3


def peak_megabytes(layer: torch.nn.Module, step: layers.Step) -> float:
    """Most bytes of tensors alive at once in a step, in 1e6; parameters and their gradients are not counted."""
    with LiveBytes(parameters_and_gradients(layer) + list(layer.buffers())) as live:
        step()
    return live.peak / 1e6


def measure_layers(lengths: Sequence[int], options: argparse.Namespace, claims: Claims) -> Dict[str, Dict[int, Dict[str, float]]]:
    """CPU seconds and peaks of every kind and length, ours and theirs."""
    found: Dict[str, Dict[int, Dict[str, float]]] = {kind: {} for kind in layers.KINDS}
    for kind in layers.KINDS:
        claims.at_most(f"{kind}: difference to Hugging Face's in float64", layers.difference(kind, min(lengths)), 1e-10)
    for seq in lengths:
        for kind in layers.KINDS:
            pair = layers.pair(kind, seq)
            steps = {name: layers.step_of(layer, seq) for name, layer in pair.items()}
            peaks = {name: peak_megabytes(pair[name], step) for name, step in steps.items()}
            timings = timed_in_turn(steps, rounds_at(seq, options))
            ratio = timings["theirs"].ratio_to(timings["ours"])
            found[kind][seq] = {
                "ours": timings["ours"].median()["cpu"],
                "theirs": timings["theirs"].median()["cpu"],
                "faster": ratio,
                "our MB": peaks["ours"],
                "their MB": peaks["theirs"],
            }
            say(f"{seq} tokens, {kind}: {ratio:.2f} times as fast; {peaks['ours']:.0f} MB, theirs {peaks['theirs']:.0f} MB")
    return found


def claim_layers(found: Dict[str, Dict[int, Dict[str, float]]], claims: Claims, quick: bool) -> None:
    """Speed (unless `quick`), memory, growth."""
    for kind, by_length in found.items():
        most = max(one["our MB"] / one["their MB"] for one in by_length.values())
        claims.at_most(f"{kind}: peak memory / Hugging Face's", most, 1.0)
        if quick:
            continue
        mean = statistics.geometric_mean([one["faster"] for one in by_length.values()])
        claims.at_least(f"{kind}: Hugging Face's time / ours, geometric mean over lengths", mean, FASTER[kind])
        times = [by_length[seq]["ours"] for seq in sorted(by_length)]
        doubles = [later / earlier for earlier, later in zip(times, times[1:])]
        if doubles and all(b == 2 * a for a, b in zip(sorted(by_length), sorted(by_length)[1:])):
            claims.at_most(f"{kind}: growth when the length doubles", max(doubles), GROWTH[kind])


def show_layers(found: Dict[str, Dict[int, Dict[str, float]]]) -> None:
    """One table a kind."""
    for kind, by_length in found.items():
        rows = [
            [seq, 1e3 * one["ours"], 1e3 * one["theirs"], one["faster"], one["our MB"], one["their MB"]]
            for seq, one in sorted(by_length.items())
        ]
        headings = ["tokens", "ours ms", "Hugging Face ms", "faster", "our peak MB", "their peak MB"]
        print(f"\n{kind}: forward and backward of a layer\n{table(headings, rows)}")


def measure_crossover(lengths: Sequence[int], options: argparse.Namespace) -> Dict[int, Dict[str, float]]:
    """CPU seconds of our layers and of full attention by torch's kernel or ours, whichever `fused` takes, in turn."""
    found = {}
    for seq in lengths:
        kinds = {"full": layers.full(), **{kind: layers.ours(n, seq, layers.theirs(n, seq)) for kind, n in layers.KINDS.items()}}
        timings = timed_in_turn({kind: layers.step_of(layer, seq) for kind, layer in kinds.items()}, rounds_at(seq, options))
        found[seq] = {kind: timing.median()["cpu"] for kind, timing in timings.items()}
        say(f"{seq} tokens: " + ", ".join(f"{kind} {1e3 * value:.0f} ms" for kind, value in found[seq].items()))
    return found


def show_crossover(found: Dict[int, Dict[str, float]]) -> None:
    """Milliseconds, and from which length on each kind is faster than full attention."""
    kinds = list(next(iter(found.values())))
    rows: List[Sequence[Any]] = [[seq, *(1e3 * times[kind] for kind in kinds)] for seq, times in found.items()]
    print(f"\nMilliseconds of a layer, forward and backward, beside full attention\n{table(['tokens', *kinds], rows)}")
    for kind in kinds[1:]:
        faster = [seq for seq, times in found.items() if times[kind] < times["full"]]
        slower = [seq for seq in found if seq not in faster]
        start = min((seq for seq in faster if not slower or seq > max(slower)), default=None)
        verdict = "slower than full at these lengths" if start is None else f"faster than full from {start} tokens on"
        print(f"{kind}: {verdict}")


def measure_model(seq: int, options: argparse.Namespace, claims: Claims) -> Dict[str, Dict[str, float]]:
    """Tokens per second of training steps and peaks: theirs; ours, which rebuilds all activations as theirs does; and ours with
    `memory.keep_last: 1`, for which their memory would leave room."""
    pair: Dict[str, torch.nn.Module] = {"theirs": models.theirs(seq)}
    pair.update({name: models.ours(pair["theirs"], kept) for name, kept in (("ours", 0), (KEPT, 1))})
    losses = models.losses(seq, pair)
    values = {name: loss().item() for name, loss in losses.items()}
    off = max(abs(value / values["theirs"] - 1.0) for value in values.values())
    claims.at_most("model: difference of the loss to Hugging Face's", off, 1e-4)
    timings = timed_in_turn(
        {name: models.step_of(pair[name], loss) for name, loss in losses.items()}, options.rounds or (1 if options.quick else 7)
    )
    found = {}
    for name, loss in losses.items():
        found[name] = {
            "tokens a second": seq / timings[name].median()["cpu"],
            "faster": timings["theirs"].ratio_to(timings[name]),
            "peak MB": peak_megabytes(pair[name], lambda loss=loss: loss().backward()),
        }
    say(f"the model, a training step of {seq} tokens")
    print(f"\nThe model\n{table(['', *found['ours']], [[name, *one.values()] for name, one in found.items()])}")
    most = max(one["peak MB"] for name, one in found.items() if name != "theirs")
    claims.at_most("model: peak memory / Hugging Face's", most / found["theirs"]["peak MB"], 1.0)
    if not options.quick:
        best = max(found["ours"]["faster"], found[KEPT]["faster"])
        claims.at_least("model: our training tokens a second / Hugging Face's, within its memory", best, MODEL_FASTER)
    return found


def main(arguments: Sequence[str]) -> int:
    """Measures, prints, and returns 0 if every claim holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short sequences, one round, no claims about time")
    parser.add_argument("--only", choices=("layers", "model", "crossover"), help="one part of the measurement")
    parser.add_argument("--lengths", type=int, nargs="+", help="sequence lengths of layers and crossover")
    parser.add_argument("--rounds", type=int, help="rounds of timing (default: 3 to 9, by length)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lengths = options.lengths or ((256, 512) if options.quick else LENGTHS)
    shorter = () if options.lengths or options.quick else (256, 512)
    wanted = (options.only,) if options.only else ("layers", "model", "crossover")
    claims, result = Claims(), {"benchmark": "reformer", "torch": torch.__version__}
    if "layers" in wanted:
        result["layers"] = measure_layers(lengths, options, claims)
        show_layers(result["layers"])
        claim_layers(result["layers"], claims, options.quick)
    if "model" in wanted:
        result["model"] = measure_model(256 if options.quick else 4096, options, claims)
    if "crossover" in wanted:
        result["crossover"] = measure_crossover((*shorter, *lengths), options)
        show_crossover(result["crossover"])
    print()
    return claims.finish(result)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
