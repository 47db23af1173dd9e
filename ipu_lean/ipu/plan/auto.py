"""The fastest plan that fits a POD, by enumeration: IPUs, layers, micro-batch, checkpoints, optimizer state, loss slices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Dict, Iterator, List, Optional, Tuple

from ipu_lean.config import Config, make_config
from ipu_lean.errors import ConfigError
from ipu_lean.ipu.plan.levers import LOW_PROPORTION, SLICE
from ipu_lean.ipu.plan.machine import MOST_IPUS
from ipu_lean.ipu.plan.network import as_ipu, workload_of
from ipu_lean.ipu.plan.pipeline import forward_stages, minimum_accumulation
from ipu_lean.ipu.plan.plan import Plan, make_plan
from ipu_lean.ipu.plan.speed import samples_per_second
from ipu_lean.ipu.plan.workload import Network, Workload

_PATIENCE = 50  # plans that the configuration's rules may refuse before it must be the configuration itself


@dataclass(frozen=True)
class Found:
    """The best plan, its configuration, its estimated samples a second, and how many plans were looked at and fitted."""

    plan: Plan
    config: Config
    speed: float
    tried: int
    fitting: int


def search(config: Config, pod: int) -> Optional[Found]:
    """The fastest plan that fits; the fastest tight one if none fits; None if none is even tight.

    The model and the global batch stay. Among equally fast plans, state on chip, larger micro-batches, more room for products and
    less slicing are preferred, in that order.

    Raises:
        ConfigError: the rules of the configuration refuse every plan.
    """
    config, _ = as_ipu(config)
    tried, fitting = 0, 0
    ranked: List[Tuple[Tuple[Any, ...], Workload]] = []
    most = config.ipu.eval_device_iterations  # fewer would leave evaluation's pipeline empty
    for workload in candidates(workload_of(config), pod, config.batch.global_batch):
        if most is not None and forward_stages(workload) > most:
            continue
        tried += 1
        verdict = make_plan(workload).verdict
        if verdict == "no":
            continue
        fitting += verdict == "fits"
        taste = (not workload.state_offchip, not workload.state_sharded, workload.micro, workload.proportions[0],
                 workload.logit_tokens or 1 << 30, workload.every_layer)
        ranked.append(((verdict == "fits", round(samples_per_second(workload), 9), *taste), workload))
    ranked.sort(key=lambda row: row[0], reverse=True)
    refusals: List[ConfigError] = []
    for _, workload in ranked:
        try:
            changed = configured(config, workload)
        except ConfigError as error:
            refusals.append(error)
            if len(refusals) == _PATIENCE:
                raise refusals[0] from None
            continue
        return Found(make_plan(workload_of(changed)), changed, samples_per_second(workload), tried, fitting)
    if refusals:
        raise refusals[0]
    return None


def candidates(start: Workload, pod: int, rows: int) -> Iterator[Workload]:
    """Every plan of the grid that trains `rows` rows an update on `pod` IPUs, pipelined or on one IPU each."""
    count = 1
    while count <= min(pod, MOST_IPUS):  # a replica does not span processes
        replicas = pod // count
        for layers in placements(start.network, count):
            tied = start.network.embedding and not start.network.head
            moved = replace(start, layers_per_ipu=layers, head_ipu=0 if tied else count - 1, embedding_ipu=0, replicas=replicas,
                            pipelined=count > 1, recomputed=True, surrogate=False)
            needed = minimum_accumulation(forward_stages(moved))
            for micro in (1, 2, 4, 8, 16, 32):
                accumulation = rows // (micro * replicas)
                if accumulation * micro * replicas == rows and accumulation >= needed:
                    yield from _settings(replace(moved, micro=micro, accumulation=accumulation))
        count *= 2


def placements(network: Network, ipus: int) -> Iterator[Tuple[int, ...]]:
    """The first IPU, which has the embedding, and the last take fewer layers or one more; the others share the rest evenly, the
    later ones taking what is over.
    """
    blocks, unit = len(network.layers) // network.block, network.block
    if ipus == 1:
        yield (len(network.layers),)
        return
    if 0 in network.layers or ipus > blocks + (1 if network.embedding else 0):
        return
    share = -(-blocks // ipus) + 1
    seen = set()
    for first in range(0 if network.embedding else 1, share + 1):
        for last in range(1, share + 1):
            middle, rest = ipus - 2, blocks - first - last
            if rest < middle or (not middle and rest):
                continue
            inner = [rest // middle + (1 if place >= middle - rest % middle else 0) for place in range(middle)] if middle else []
            layers = tuple(unit * number for number in (first, *inner, last))
            if layers not in seen:
                seen.add(layers)
                yield layers


def _settings(workload: Workload) -> Iterator[Workload]:
    shares = sorted({workload.proportions[0], LOW_PROPORTION})
    slices = {workload.logit_tokens, SLICE}
    for offchip in (False, True):
        for sharded in (False, True) if workload.replicas > 1 and not offchip else (False,):
            for share in shares:
                for tokens in slices:
                    for every in (True, False) if workload.pipelined else (True,):
                        yield replace(workload, state_offchip=offchip, state_sharded=sharded, proportions=(share,),
                                      logit_tokens=tokens, every_layer=every)


def configured(config: Config, workload: Workload) -> Config:
    """The configuration of a plan. ConfigError where the configuration's own rules refuse it."""
    changes = keys_of(config, workload)
    values = config.model_dump(exclude_unset=True)
    for path, value in changes.items():
        section, _, name = path.partition(".")
        values.setdefault(section, {})
        values[section] = {**values[section], name: value} if name else value
    return make_config(**values)


def keys_of(config: Config, workload: Workload) -> Dict[str, Any]:
    """What a plan sets, by key."""
    chunk = workload.logit_tokens
    unset = workload_of(config).logit_tokens == chunk
    return {
        "batch.micro": workload.micro,
        "batch.accumulation": workload.accumulation,
        "batch.replicas": workload.replicas,
        "ipu.layers_per_ipu": list(workload.layers_per_ipu),
        "ipu.embedding_ipu": 0,
        "ipu.head_ipu": None,
        "ipu.execution": "pipelined",
        "ipu.recompute_checkpoint_every_layer": workload.every_layer,
        "ipu.optimizer_state_offchip": workload.state_offchip,
        "ipu.replicated_tensor_sharding": workload.state_sharded,
        "ipu.matmul_proportion": workload.proportions[0],
        "memory.loss_chunk": config.memory.loss_chunk if unset else chunk,
        "memory.ipu_backward": "recompute",
    }


def explain(found: Found) -> List[str]:
    """The choice in five lines."""
    plan, workload = found.plan, found.plan.workload
    full = max(plan.ipus, key=lambda row: row.after)
    before, after = (100 * share for share in full.shares)
    keeps = "the input of every layer" if workload.every_layer else "the input of every stage"
    where = "in streaming memory" if workload.state_offchip else "on chip"
    shared = ", spread over the replicas" if workload.state_sharded else ""
    return [
        f"{found.tried} plans were compared, {found.fitting} of them fit; the fastest (about {found.speed:,.1f} samples/s):",
        f"{workload.ipus} IPU{'' if workload.ipus == 1 else 's'} a replica x {workload.replicas} replicas, layers "
        f"{list(workload.layers_per_ipu)}, F = {plan.forward}, bubble {100 * plan.idle:.1f} %",
        f"micro-batches of {workload.micro}, {workload.accumulation} of them (2F-1 = {plan.needed}): the global batch stays "
        f"{workload.global_batch}",
        f"kept for the backward pass: {keeps}; optimizer state {where}{shared}",
        f"fullest: IPU {full.ipu} with {before:.0f} %, {after:.0f} % with temporaries: {plan.verdict}",
    ]
