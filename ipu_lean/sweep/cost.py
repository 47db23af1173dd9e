"""What a trial costs, from its configuration alone: parameters, arithmetic, bytes. Estimates, for planning only."""

from __future__ import annotations

import os
from typing import Optional

from ipu_lean.config import Config, derived, layer_kinds
from ipu_lean.data import expected_features, expected_vocab

COPIES = 6  # weights, gradients, two moments, and the sums and copies in between
ACTIVATIONS = 12  # widths that a layer keeps of each token, besides the feed-forward and the scores


def tokens(config: Config) -> int:
    """Labels in one micro-batch."""
    return config.batch.micro * (config.model.seq if config.model.kind == "gpt" else 1)


def parameters(config: Config) -> int:
    """Weights of the model, norms and biases left out."""
    model = config.model
    if model.kind != "gpt":
        return model.width * (expected_features(config) + (model.depth - 1) * model.width + expected_vocab(config))
    matrices = 3 if model.activation.endswith("glu") else 2
    kinds = layer_kinds.distinct_kinds(model)
    projections = sum(3 if kind == "lsh" else 4 for kind in kinds)
    inside = projections * derived.attention_width(model) + len(kinds) * matrices * derived.ffn_width(model)
    readout = 0 if derived.tied(model) else derived.hidden_width(model)
    return derived.stack_width(model) * inside + expected_vocab(config) * (model.width + readout)


def work(config: Config) -> float:
    """Floating-point operations of one update: 6 for each weight and token, and attention's scores."""
    model = config.model
    share = derived.visits(model) / derived.groups(model) if model.kind == "gpt" else 1.0
    scores = 2.0 * derived.attention_width(model) * _keys(config) if model.kind == "gpt" else 0.0
    micro_batches = config.batch.accumulation * config.batch.replicas
    return micro_batches * tokens(config) * 6.0 * (parameters(config) * share + scores)


def bytes_each(config: Config) -> int:
    """Memory of one trial among others: its tensors and what the backward pass keeps of one micro-batch, in float32."""
    model = config.model
    if model.kind != "gpt":
        kept = 4 * model.depth * model.width
    else:
        layer = ACTIVATIONS * model.width + 3 * derived.ffn_width(model)
        kept = model.depth * layer + 2 * derived.heads(model) * _keys(config) + 3 * expected_vocab(config)
    return 4 * (COPIES * parameters(config) + tokens(config) * kept)


def _keys(config: Config) -> int:
    """Scores of one token in one head, over all layers."""
    return sum(layer_kinds.keys_of_a_query(config.model, kind) for kind in layer_kinds.kinds(config.model))


def available_bytes() -> Optional[int]:
    """Memory that this machine (or this container) can still give; None where it does not say."""
    found = []
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        pass
    for most, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(most, encoding="ascii") as limit, open(used, encoding="ascii") as now:
                found.append(int(limit.read()) - int(now.read()))
        except (OSError, ValueError):
            continue
    if not found and "SC_AVPHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(found)) if found else None
