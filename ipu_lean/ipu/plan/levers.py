"""What to change when a plan does not fit, in the order in which people who train on IPUs try it (docs/plan.md).

A lever turns one workload into another and touches fields of its own, so the order in which several are pulled changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, List, Optional, Sequence, Tuple

from ipu_lean.ipu.plan.machine import FITS
from ipu_lean.ipu.plan.pipeline import forward_stages, minimum_accumulation
from ipu_lean.ipu.plan.plan import Plan, make_plan
from ipu_lean.ipu.plan.workload import Network, Workload

LOW_PROPORTION = 0.15  # what the published recipes of full IPUs use
SLICE = 128  # tokens of the loss at once, as in Graphcore's GPT-2
SHORTEST = 128


@dataclass(frozen=True)
class Lever:
    """`pull` gives the changed workload, or the very same one where there is nothing left to change; `keys` says what changed."""

    name: str
    pull: Callable[[Workload], Workload]
    keys: Callable[[Workload], str]


@dataclass(frozen=True)
class Pulled:
    """A lever and what it led to: the keys to change, and the plan afterwards."""

    lever: str
    keys: str
    plan: Plan


def _micro(workload: Workload) -> Workload:
    if workload.micro % 2:
        return workload
    return replace(workload, micro=workload.micro // 2, accumulation=workload.accumulation * 2)


def _checkpoints(workload: Workload) -> Workload:
    if workload.surrogate or not workload.training:
        return workload
    return replace(workload, every_layer=True, recomputed=True)


def _proportion(workload: Workload) -> Workload:
    return replace(workload, proportions=tuple(min(share, LOW_PROPORTION) for share in workload.proportions))


def _slices(workload: Workload) -> Workload:
    if workload.logit_tokens is not None and workload.logit_tokens <= SLICE:
        return workload
    return replace(workload, logit_tokens=SLICE)


def _offchip(workload: Workload) -> Workload:
    return replace(workload, state_offchip=True)


def _sharded(workload: Workload) -> Workload:
    return replace(workload, state_sharded=True)  # of no use with one replica, so it is not advised there


def _later(workload: Workload) -> Workload:
    return replace(workload, layers_per_ipu=spread(workload.network, len(workload.layers_per_ipu)) or workload.layers_per_ipu)


def _more(workload: Workload) -> Workload:
    """Twice the IPUs, and half the replicas; a readout on the last IPU moves along unless it is the embedding's matrix."""
    count, network = len(workload.layers_per_ipu), workload.network
    layers = spread(network, 2 * count)
    if layers is None or workload.surrogate:
        return workload
    stays = not network.head or workload.head_ipu < count - 1
    return replace(workload, layers_per_ipu=layers, head_ipu=workload.head_ipu if stays else 2 * count - 1,
                   replicas=max(1, workload.replicas // 2), pipelined=workload.pipelined or count == 1, recomputed=True)


def _moments(workload: Workload) -> Workload:
    if not workload.moments:
        return workload
    first, *others = workload.moments
    return replace(workload, moments=(min(2, first), *others), accumulator=min(2, workload.accumulator))


def _shorter(workload: Workload) -> Workload:
    network = workload.network
    if network.seq % 2 or network.seq // 2 < SHORTEST:
        return workload
    return replace(workload, network=replace(network, seq=network.seq // 2))


def spread(network: Network, ipus: int) -> Optional[Tuple[int, ...]]:
    """Layers on each IPU with none beside the embedding; the later ones take what is over, since they keep fewer micro-batches.

    None where layers share weights, so that they cannot be moved freely, or where an IPU would get none.
    """
    blocks = len(network.layers) // network.block
    others = ipus - 1 if network.embedding and ipus > 1 else ipus
    if blocks < others or 0 in network.layers:
        return None
    shares = [blocks // others + (1 if place >= others - blocks % others else 0) for place in range(others)]
    return (*[0] * (ipus - others), *(share * network.block for share in shares))


def _layers_text(workload: Workload) -> str:
    return f"ipu.layers_per_ipu: {list(workload.layers_per_ipu)}"


def _more_text(workload: Workload) -> str:
    needed = minimum_accumulation(forward_stages(workload))
    more = f", batch.accumulation: {needed} or more" if workload.accumulation < needed else ""
    alone = ", ipu.replicated_tensor_sharding: false" if workload.state_sharded and workload.replicas == 1 else ""
    shares = [round(workload.proportion(ipu), 4) for ipu in range(workload.ipus)]  # one for each IPU, if they were a list
    listed = f", ipu.matmul_proportion: {shares}" if len(workload.proportions) > 1 else ""
    return f"{_layers_text(workload)}, batch.replicas: {workload.replicas}{listed}{alone}{more}"


LEVERS: Tuple[Lever, ...] = (
    Lever("smaller micro-batches", _micro, lambda w: f"batch.micro: {w.micro}, batch.accumulation: {w.accumulation}"),
    Lever("recompute layer by layer", _checkpoints, lambda w: "ipu.recompute_checkpoint_every_layer: true"),
    Lever("less room for matrix products", _proportion, lambda w: f"ipu.matmul_proportion: {_shares(w)}"),
    Lever("the loss in slices", _slices, lambda w: f"memory.loss_chunk: {w.logit_tokens}"),
    Lever("optimizer state off chip", _offchip, lambda w: "ipu.optimizer_state_offchip: true"),
    Lever("optimizer state shared by the replicas", _sharded, lambda w: "ipu.replicated_tensor_sharding: true"),
    Lever("layers off the first IPUs", _later, _layers_text),
    Lever("more IPUs", _more, _more_text),
    Lever("fp16 sums and moments", _moments, lambda w: "ipu.accumulator: half, ipu.first_moment: half"),
    Lever("shorter sequences", _shorter, lambda w: f"model.seq: {w.network.seq}"),
)


def _shares(workload: Workload) -> str:
    shares = sorted(set(workload.proportions))
    return f"{shares[0]:g}" if len(shares) == 1 else str([round(share, 4) for share in workload.proportions])


def first_lever(plan: Plan, levers: Sequence[Lever] = LEVERS, always: bool = False) -> Optional[Pulled]:
    """The first of `levers` that was not pulled yet and relieves the worst IPU; None if nothing helps, or if all fit (unless
    `always`: the compiler may know better).
    """
    if plan.guilty is None and not always:
        return None
    for lever in levers:
        changed = lever.pull(plan.workload)
        if changed == plan.workload:
            continue
        after = make_plan(changed)
        if _excess(after) < _excess(plan):
            return Pulled(lever.name, lever.keys(changed), after)
    return None


def levers_until_it_fits(plan: Plan, levers: Sequence[Lever] = LEVERS) -> List[Pulled]:
    """One lever after the other, each as long as it helps, until everything fits or nothing is left."""
    found: List[Pulled] = []
    while plan.guilty is not None:
        step = first_lever(plan, levers)
        if step is None:
            break
        found.append(step)
        plan = step.plan
    return found


def _excess(plan: Plan) -> float:
    """How far the worst IPU is from fitting, in shares of its memory."""
    return max(max(row.shares[0] - FITS.before, row.shares[1] - FITS.after) for row in plan.ipus)
