"""Whether PopTorch would compile a recorded graph: ops, loss, stages, IPUs, batches. Each check returns what is wrong."""
from __future__ import annotations

from typing import Any, Iterator, List, NamedTuple, Optional, Set

import torch
from torch import fx

from . import optable, sessionoptions
from .enums import OutputMode
from .graph import final_losses
from .location import Where
from .options import Options


class Violation(NamedTuple):
    """One rule that is broken: its short name, what is wrong with the numbers, and where in the user's program."""

    rule: str
    message: str
    where: Optional[Where] = None

    def __str__(self) -> str:
        return self.message if self.where is None else f"{self.message} ({self.where})"


def in_order(live: Set[fx.Node]) -> List[fx.Node]:
    """The living nodes as they were recorded, so that what comes first in the program is reported first."""
    return [node for node in next(iter(live)).graph.nodes if node in live] if live else []


def execution_mode(options: Options) -> int:
    """0 pipelined, 1 sharded, 2 phased."""
    return options._execution_strategy.backendOptions()["execution_mode"]


def unsupported_ops(live: Set[fx.Node]) -> Iterator[Violation]:
    """Ops without a handler (ErrorOnUnsupportedAten.cpp:30). Ops of constants only are computed on the host and may be any."""
    seen: Set[Any] = set()
    for node in in_order(live):
        name = node.meta.get("op", "")
        if node.meta.get("kind") != "op" or not name.startswith("aten::") or node.meta["constant"]:
            continue
        key = (name, node.meta["where"])
        if not optable.is_supported(name) and key not in seen:
            seen.add(key)
            yield Violation("op", f"Unsupported ops found in compiled model: [{name}]", node.meta["where"])


def loss_rules(graph: fx.Graph, live: Set[fx.Node]) -> Iterator[Violation]:
    """Exactly one marked loss that feeds no other, and it is a scalar (RemoveSurplusIdentityLosses.cpp:141-145)."""
    final, count = final_losses(graph, live)
    if count == 0:
        yield Violation("loss", "Couldn't find a loss in graph! A training model must return its loss, made by a torch loss "
                                "function or by poptorch.identity_loss")
    elif len(final) != 1:
        places = "; ".join(str(node.meta["where"]) for node in reversed(final))
        yield Violation("loss", "Multiple independent losses found in graph. Graph must have one final loss: combine them, wrap "
                                f"the sum in poptorch.identity_loss, and compute metrics without loss functions ({places})")
    elif _elements(final[0].meta.get("shape", ())) != 1:
        shape = list(final[0].meta["shape"])
        yield Violation("loss", f"The final loss must be a scalar, it has shape {shape}", final[0].meta["where"])


def _elements(shape: Any) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def active_blocks(live: Set[fx.Node]) -> Iterator[Violation]:
    """Every op must be in a block once one was closed (CompilerImpl.cpp:424-427)."""
    for node in in_order(live):
        if node.meta.get("kind") == "op" and not node.meta["constant"] and node.meta["ipu"] < 0:
            message = f"No active Block, all the ops must belong to a Block: {node.meta['op']}"
            yield Violation("block", message, node.meta["where"])
            return


def used_ipus(live: Set[fx.Node]) -> Set[int]:
    return {node.meta["ipu"] for node in live if node.meta.get("kind") == "op" and node.meta["ipu"] >= 0
            and not node.meta["constant"]} or {0}


def ipu_count(live: Set[fx.Node], options: Options) -> int:
    """max(distinct ids, highest id + 1) for each replica (CompilerImpl.cpp:634-636): gaps are paid for."""
    ipus = used_ipus(live)
    return max(len(ipus), max(ipus) + 1) * options.replication_factor


def rounded(count: int) -> int:
    power = 1
    while power < count:
        power *= 2
    return power


def device_size(live: Set[fx.Node], options: Options) -> Iterator[Violation]:
    """A power of two, at most 64 for each process (CompilerImpl.cpp:234-239, 693-718)."""
    count = ipu_count(live, options)
    on_hardware = not (options.exists("use_model") and options.use_model) and not options.exists("ipu_version")
    if on_hardware and rounded(count) != count and not options.auto_round_num_ipus:
        yield Violation("ipus", f"The model specifies the use of {count} IPUs, however PopTorch must reserve a power of 2: "
                                f"{rounded(count)}. Use another number of IPUs or Options.autoRoundNumIPUs(True)")
    if count > 64:
        yield Violation("ipus", f"Too many IPUs requested ({count}). More than 64 IPUs require distributed execution")


def pipeline_depth(switches: int, options: Options, training: bool) -> Iterator[Violation]:
    """2F-1 accumulation steps in training, F device iterations in inference (Compiler.cpp:672-702)."""
    if execution_mode(options) != 0:
        return
    forward = switches + 1
    accumulation, iterations = options.Training.gradient_accumulation, options.device_iterations
    if training and accumulation < 2 * forward - 1:
        yield Violation("pipeline", f"Training.gradientAccumulation ({accumulation}) must be at least the number of pipeline "
                                    f"stages: {forward} forward stages make 2 * {forward} - 1 = {2 * forward - 1} in training")
    if not training and iterations < forward:
        yield Violation("pipeline", f"deviceIterations ({iterations}) must be at least the number of pipeline stages ({forward})")


def stage_order(live: Set[fx.Node], options: Options) -> Iterator[Violation]:
    """Data may only flow to the same or a later stage (overview.rst:394-411)."""
    if execution_mode(options) != 0 or len(used_ipus(live)) < 2:
        return
    for node in in_order(live):
        if node.meta.get("kind") != "op":
            continue
        for source in node.all_input_nodes:
            origin = source.meta
            if origin.get("kind") in ("op", "element") and not origin["constant"] and origin["stage"] > node.meta["stage"]:
                yield Violation("stage", f"Pipeline stages must ascend along the dataflow, but {node.meta['op']} in stage "
                                         f"{node.meta['stage']} uses a tensor of stage {origin['stage']}. To come back to an IPU "
                                         "use poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)", node.meta["where"])
                return


def shared_variables(graph: fx.Graph, live: Set[fx.Node], options: Options) -> Iterator[Violation]:
    """A weight lives on one IPU when pipelining (popart transforms/pipeline.cpp:141-145); sharded execution copies it."""
    if execution_mode(options) != 0:
        return
    for node in graph.nodes:
        if node.meta.get("kind") not in ("parameter", "buffer"):
            continue
        users = [user for user in node.users if user in live and user.meta.get("kind") == "op" and user.meta["ipu"] >= 0]
        ipus = sorted({user.meta["ipu"] for user in users})
        if len(ipus) > 1:
            message = (f"Can not copy variable tensor {node.meta['name']} between virtual graphs when pipelining: it is used on "
                       f"IPUs {ipus}. Put all of its users on one IPU")
            yield Violation("tied", message, users[-1].meta["where"])


def replicated_writes(live: Set[fx.Node], graph: fx.Graph, options: Options) -> Iterator[Violation]:
    """Replicas cannot agree on a variable that the model writes (poptorch/source/InplaceOps.cpp:226-233)."""
    if options.replication_factor == 1 or not options.broadcast_buffers:
        return
    for name in sorted(written_variables(graph, live)):
        yield Violation("broadcast", f"{name} is written in place by a replicated model: use Options.broadcastBuffers(False)")


def written_variables(graph: fx.Graph, live: Set[fx.Node]) -> List[str]:
    """Names of float parameters and buffers that a living op writes into."""
    written: Set[int] = set()
    for node in live:
        written |= node.meta.get("mutates", set())
    return [node.meta["name"] for node in graph.nodes
            if node.meta.get("kind") in ("parameter", "buffer") and node.meta["groups"] & written]


def session_options(options: Options) -> Iterator[Violation]:
    """Names that PopART does not have (SessionOptionsImpl.hpp:43)."""
    for message in sessionoptions.unknown(options._popart.options):
        yield Violation("option", message)


def loss_scaling(live: Set[fx.Node], options: Options) -> Iterator[Violation]:
    """Automatic loss scaling watches float16 gradients (popart transforms/automaticlossscaling.cpp:277)."""
    if not options._popart.options.get("automaticLossScalingSettings.enabled", False):
        return
    if not any(torch.float16 in node.meta.get("dtypes", ()) for node in live):
        yield Violation("loss scaling", "setAutomaticLossScaling(True): no tracked gradient tensors of type fp16 were found. It "
                                        "is for float16 models")


def overlapped_io(live: Set[fx.Node], options: Options) -> Iterator[Violation]:
    """Not with pipelines, and only with IO tiles and output mode All or Sum (Compiler.cpp:1766-1785)."""
    for node in in_order(live):
        if not node.meta.get("op", "").startswith("poptorch::set_overlap") or node.args[1] == "no_overlap":
            continue
        if execution_mode(options) == 0:
            yield Violation("overlap", "Overlapped IO is not supported with PipelinedExecution; on one IPU use ShardedExecution",
                            node.meta["where"])
        elif not options.TensorLocations.exists("numIOTiles"):
            yield Violation("overlap", "Overlapped IO needs at least 32 IO tiles: TensorLocations.numIOTiles", node.meta["where"])
        elif options.output_mode not in (OutputMode.All, OutputMode.Sum, OutputMode.Default):
            yield Violation("overlap", "Overlapped IO needs OutputMode.All or OutputMode.Sum", node.meta["where"])
        return


def all_violations(graph: fx.Graph, live: Set[fx.Node], switches: int, options: Options, training: bool) -> List[Violation]:
    """Everything that would stop the compilation, in the order in which PopTorch meets it."""
    found: List[Violation] = [*session_options(options)]
    found += replicated_writes(live, graph, options)
    if training:
        found += loss_rules(graph, live)
        found += loss_scaling(live, options)
    found += unsupported_ops(live)
    found += active_blocks(live)
    found += stage_order(live, options)
    found += shared_variables(graph, live, options)
    found += overlapped_io(live, options)
    found += pipeline_depth(switches, options, training)
    found += device_size(live, options)
    return found

