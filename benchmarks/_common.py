"""What the benchmarks share: live bytes of tensors, steps timed in turn, a table and one JSON line."""
from __future__ import annotations

import json
import multiprocessing
import statistics
import time
import weakref
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Sequence, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# A plain step is one forward pass and two more for the backward; inverting runs the whole forward pass a second time, because a
# branch's last product is part of what is subtracted (a checkpoint may leave it out). So 4/3 is the floor, and this is 4 % above.
SECOND_RUN = 1.39


def tensors_in(tree: Any) -> Iterable[torch.Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))


class LiveBytes(TorchDispatchMode):
    """Bytes of tensor storage made by operations inside the `with` block and still alive: `.now`, and the most so far: `.peak`.

    Every operation that reaches the dispatcher is seen, those of a backward pass too. A storage counts once, whatever its views,
    from the operation that returns it until it is freed; workspaces inside a kernel are not seen. Needs torch 2.1 or newer, where
    a storage has one Python object for life.

    Args:
        ignore: tensors that exist already (parameters, gradients, inputs); their storage is not counted.
    """

    def __init__(self, ignore: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {t.untyped_storage()._cdata for t in ignore}
        # Kept alive, so that no new storage gets the address of an ignored one.
        self._ignored = list(ignore)

    def _forget(self, key: int, size: int) -> None:
        self.now -= size
        self._known.discard(key)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._forget, key, size)
        return out


def parameters_and_gradients(module: torch.nn.Module) -> List[torch.Tensor]:
    """Parameters and their gradients; gradients that are missing are made (zeros), so that a step makes none itself."""
    found: List[torch.Tensor] = []
    for parameter in module.parameters():
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
        found += [parameter] if parameter.grad is None else [parameter, parameter.grad]
    return found


class Timing(NamedTuple):
    """Seconds of a step in each round: by the wall clock, and CPU time of this process (steadier on a busy machine)."""

    wall: List[float]
    cpu: List[float]

    def median(self) -> Dict[str, float]:
        """Medians over the rounds."""
        return {"wall": statistics.median(self.wall), "cpu": statistics.median(self.cpu)}

    def ratio_to(self, other: Timing) -> float:
        """Median over the rounds of this CPU time by the other's in the same round: slow drifts of the machine cancel."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.cpu, other.cpu))


def timed_in_turn(steps: Dict[str, Callable[[], Any]], rounds: int, warmup: int = 1) -> Dict[str, Timing]:
    """Runs every step once a round, all in turn, so that what else the machine does hits them alike; `warmup` rounds first."""
    timings = {name: Timing([], []) for name in steps}
    for turn in range(warmup + rounds):
        for name, step in steps.items():
            start_wall, start_cpu = time.perf_counter(), time.process_time()
            step()
            if turn >= warmup:
                timings[name].cpu.append(time.process_time() - start_cpu)
                timings[name].wall.append(time.perf_counter() - start_wall)
    return timings


def _serve(pipe: Any, build: Callable[..., Callable[[], Any]], arguments: Sequence[Any]) -> None:
    """The other end of `Remote`: builds the step, then runs it whenever it is told to, and answers with its seconds."""
    torch.set_num_threads(1)
    step = build(*arguments)
    pipe.send(None)
    while pipe.recv():
        start_wall, start_cpu = time.perf_counter(), time.process_time()
        step()
        pipe.send((time.perf_counter() - start_wall, time.process_time() - start_cpu))


class Remote:
    """A step in a process of its own, as a program that does nothing else would run it.

    In one process the steps meet each other's heap: whether a large one pays for fresh pages depends on what ran before it.

    Args:
        build: a function of a module (it is looked up by name in the other process); returns the step.
    """

    def __init__(self, build: Callable[..., Callable[[], Any]], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, build, arguments), daemon=True)
        self._process.start()
        self._pipe.recv()

    def step(self) -> Tuple[float, float]:
        """Runs it once: (wall, CPU) seconds."""
        self._pipe.send(True)
        return self._pipe.recv()

    def close(self) -> None:
        """Ends the process."""
        self._pipe.send(False)
        self._process.join()


def timed_apart(remotes: Dict[str, Remote], rounds: int, warmup: int = 1) -> Dict[str, Timing]:
    """As `timed_in_turn`, each step in its own process; ends the processes."""
    timings = {name: Timing([], []) for name in remotes}
    for turn in range(warmup + rounds):
        for name, remote in remotes.items():
            wall, cpu = remote.step()
            if turn >= warmup:
                timings[name].wall.append(wall)
                timings[name].cpu.append(cpu)
    for remote in remotes.values():
        remote.close()
    return timings


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Plain text, columns aligned, numbers with three digits after the point."""
    lines = [list(headings)] + [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    return "\n".join("  ".join([line[0].ljust(widths[0])] + [v.rjust(w) for v, w in zip(line[1:], widths[1:])]) for line in lines)


class Claims:
    """Named statements that hold or do not."""

    def __init__(self) -> None:
        self.found: List[Dict[str, Any]] = []

    def at_most(self, name: str, value: float, bound: float) -> None:
        """`value` <= `bound`."""
        self.found.append({"claim": name, "value": value, "bound": bound, "holds": value <= bound})

    def at_least(self, name: str, value: float, bound: float) -> None:
        """`value` >= `bound`."""
        self.found.append({"claim": name, "value": value, "bound": bound, "holds": value >= bound})

    def finish(self, result: Dict[str, Any]) -> int:
        """Prints each claim and, as the last line, everything as JSON; returns the exit status."""
        for claim in self.found:
            word = "holds" if claim["holds"] else "FAILS"
            print(f"{word}  {claim['claim']}: {claim['value']:.4g} (bound {claim['bound']:.4g})")
        holds = all(claim["holds"] for claim in self.found)
        print(json.dumps({**result, "claims": self.found, "holds": holds}))
        return 0 if holds else 1
