"""From a configuration to a network's numbers and to a workload, without building the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, List, Optional, Set, Tuple

from ipu_lean.config import Config, ModelConfig, derived, layer_kinds
from ipu_lean.config.ipu_rules import IPU_PRECISIONS
from ipu_lean.config.layout import IPU_DEVICES, accumulator, first_moment, is_half, layout, stages
from ipu_lean.errors import ConfigError
from ipu_lean.ipu.plan.chunked import Chunked
from ipu_lean.ipu.plan.machine import MATMUL_PROPORTION, PODS
from ipu_lean.ipu.plan.workload import Network, Workload

_BYTES = {"half": 2, "float": 4}
_CHUNK_BYTES = 32 * 2**20  # nn/loss.py: automatic chunks hold about as many bytes of float32 logits
_GATED = ("geglu", "swiglu", "reglu")


def as_ipu(config: Config) -> Tuple[Config, List[str]]:
    """The configuration as an IPU would run it, and what had to be assumed: another device, 16 bits that an IPU has not."""
    notes: List[str] = []
    changes = {}
    if config.device not in IPU_DEVICES:
        notes.append(f"the device is {config.device}; planned as if it were an IPU")
        changes["device"] = "ipu"
    if config.precision not in IPU_PRECISIONS:
        notes.append(f"an IPU has no {config.precision}; planned with fp16-ipu")
        changes["precision"] = "fp16-ipu"
    return (config.model_copy(update=changes) if changes else config), notes


def network_of(config: Config) -> Network:
    """The numbers of the configuration's model."""
    return _mlp(config) if config.model.kind == "mlp" else _gpt(config)


def workload_of(config: Config, pod: Optional[int] = None) -> Workload:
    """How the configuration runs on IPUs; call `as_ipu` first.

    Args:
        pod: IPUs of the machine, which as many replicas share as there is room for; None for batch.replicas.
    Raises:
        ConfigError: the layers do not add up, or one replica is larger than the pod.
    """
    where, ipu, batch = layout(config), config.ipu, config.batch
    half, pipelined = is_half(config), stages(config) > 1
    given = ipu.matmul_proportion
    proportions = tuple(given) if isinstance(given, list) else (MATMUL_PROPORTION if given is None else given,)
    found = Workload(
        name=config.name,
        network=network_of(config),
        layers_per_ipu=where.layers,
        head_ipu=where.head,
        embedding_ipu=where.embedding,
        micro=batch.micro,
        accumulation=batch.accumulation,
        replicas=batch.replicas,
        device_iterations=batch.device_iterations,
        element=2 if half else 4,
        accumulator=_BYTES[accumulator(config)],
        moments=_moments(config),
        state_offchip=ipu.optimizer_state_offchip,
        state_sharded=ipu.replicated_tensor_sharding,
        every_layer=ipu.recompute_checkpoint_every_layer,
        recomputed=pipelined or ipu.recompute_checkpoint_every_layer,
        pipelined=pipelined,
        surrogate=derived.surrogate(config),
        proportions=proportions,
        logit_tokens=_logit_tokens(config),
        logit_bytes=10 if half else 12,  # logits as they come, softmax and gradient in float32
    )
    return found if pod is None else _on_pod(found, pod)


def vocab_of(config: Config) -> int:
    """Numbers in a token's logits; the classes of images, or of texts."""
    if config.data.images is not None:
        from ipu_lean.data.shapes import expected_vocab

        return expected_vocab(config)
    if config.model.head == "classifier":
        from ipu_lean.data.labelled import expected_classes

        return expected_classes(config)
    return _rows(config)


def _rows(config: Config) -> int:
    """Rows of the embedding; only a tokenizer that is loaded has to be asked (numpy, and its own package)."""
    if config.model.vocab is None and config.data.tokenizer.path is not None:
        from ipu_lean.data.shapes import expected_vocab

        return expected_vocab(config)
    return config.model.vocab or derived.least_rows(config)


def _head(config: Config) -> int:
    """Parameters of the readout of a gpt; a classifier has a dense layer before it."""
    model, hidden, vocab = config.model, derived.hidden_width(config.model), vocab_of(config)
    if model.head == "classifier":
        bias = int(model.bias)
        return (hidden + bias) * model.width + (model.width + bias) * vocab
    return 0 if derived.tied(model) else (hidden + int(model.readout_bias)) * vocab


def _on_pod(workload: Workload, pod: int) -> Workload:
    if pod not in PODS:
        raise ConfigError(f"a POD has {', '.join(map(str, PODS[:-1]))} or {PODS[-1]} IPUs", key="--pod", value=pod)
    if workload.ipus > pod:
        raise ConfigError(
            f"one replica takes {workload.ipus} IPUs",
            key="--pod",
            value=pod,
            suggestion="use a larger POD, or fewer IPUs in `ipu.layers_per_ipu`",
        )
    return replace(workload, replicas=pod // workload.ipus)


def _moments(config: Config) -> Tuple[int, ...]:
    """Bytes of optimizer state for each parameter."""
    first = _BYTES[first_moment(config)]
    if config.optimizer.kind == "sgd":
        return (first,) if config.optimizer.momentum else ()
    return (first, 4)


def _logit_tokens(config: Config) -> Optional[int]:
    chunk = config.memory.loss_chunk
    if chunk is None:
        return max(1, _CHUNK_BYTES // (4 * vocab_of(config)))
    return chunk or None


def _gpt(config: Config) -> Network:
    model = config.model
    width, ffn = derived.stack_width(model), derived.ffn_width(model)
    hidden, rows = derived.hidden_width(model), _rows(config)
    gated, affine = model.activation in _GATED, model.stack.kind == "reversible" and model.stack.coupling == "affine"
    bias, norm = int(model.bias), 2 if model.norm == "layernorm" else 1
    branches = 2 * (2 if model.sandwich else 1) * norm * width + (2 * (width * width + bias * width) if affine else 0)
    up = 2 if gated else 1
    feed_forward = (up + 1) * width * ffn + bias * (up * ffn + width)
    extras = ((2 if model.sandwich else 0) + (2 if affine else 0)) * width + _written_out(config)
    seq = layer_kinds.padded_length(model, model.seq)
    # Norm inputs, q, k, v, what enters the output projection, what enters the feed-forward: 8 d. Before and after the activation:
    # 2 f (a ReLU needs its result only), with a gate also the other factor and the product.
    inside = (4 if gated else 2) - (1 if model.activation in ("relu", "reglu") else 0)
    saved = 4 * (width + derived.attention_width(model)) + extras + inside * ffn
    return Network(
        layers=_layers(config, feed_forward + branches),
        boundary=2 * width if model.stack.kind == "reversible" else width,
        entry=model.width,
        hidden=hidden,
        saved=saved,
        masks=2 * width,
        heads=derived.heads(model),
        seq=seq,
        vocab=vocab_of(config),
        embedding=rows * model.width + _positions(model),
        norm=norm * hidden,
        head=_head(config),
        labels=1 if model.head == "classifier" else model.seq if model.seq < seq else 0,
        block=2 if model.stack.order == "aaff" else 1,
        chunked=_chunked(model, seq),
        working=extras + (inside + 2) * ffn,
        moving=ffn if gated else 0,
        inner=derived.attention_width(model),
        fed=_fed(config) * ffn,
        # Read off traced steps: gradients, sums and both streams are seven tensors of a stream's size, in float32 always.
        around=(7 * 4 - 2 * _element(config)) * width + _element(config) * extras,
    )


def _element(config: Config) -> int:
    """Bytes of a weight or activation."""
    return 2 if is_half(config) else 4


def _fed(config: Config) -> int:
    """Bytes that deriving the feed-forward takes for a number inside it, read off traced steps: GELU's derivative is written out
    in float32 (six of them); a ReLU without a gate needs its mask and two gradients, the others five."""
    if config.model.activation in ("gelu", "geglu"):
        return 24
    return (3 if config.model.activation == "relu" else 5) * _element(config)


def _written_out(config: Config) -> int:
    """What RMS norms keep, which are no operation of their own: their result before the gain, and fp16 inputs in float32."""
    model = config.model
    each = 0 if model.norm == "layernorm" else 3 if is_half(config) else 1
    return each * (3 if model.sandwich else 2) * derived.stack_width(model)  # the last one is done when most is alive


def _positions(model: ModelConfig) -> int:
    """Parameters of learned positions: a row for each, or one for each row and each column of a grid."""
    if model.positions == "axial":
        return sum(count * dims for count, dims in zip(layer_kinds.axial_shape(model), layer_kinds.axial_dims(model)))
    return model.seq * model.width if model.positions == "learned" else 0


def _chunked(model: ModelConfig, seq: int) -> Tuple[Optional[Chunked], ...]:
    """Local and hashed attention of each layer; () if all are full."""
    kinds = layer_kinds.kinds(model)
    if set(kinds) == {"full"}:
        return ()
    heads, inner = derived.heads(model), derived.attention_width(model)
    whole = {"local": model.local.chunk, "lsh": layer_kinds.full_below(model)}
    made: Dict[str, Optional[Chunked]] = {"full": None}
    for kind, part in (("local", model.local), ("lsh", model.lsh)):
        if seq <= whole[kind]:
            made[kind] = Chunked(kind == "lsh", heads, inner, seq)
        else:
            window, rounds = part.before + 1 + part.after, model.lsh.hashes if kind == "lsh" else 1
            made[kind] = Chunked(kind == "lsh", heads, inner, part.chunk * window, window, rounds)
    return tuple(made[kind] for kind in kinds)


def _attention(model: ModelConfig, kind: str) -> int:
    """Parameters of a layer's projections; hashed attention has one for queries and keys."""
    width, inner, bias = derived.stack_width(model), derived.attention_width(model), int(derived.attention_bias(model))
    return (2 if kind == "lsh" else 3) * (width + bias) * inner + (inner + bias) * width


def _layers(config: Config, rest: int) -> Tuple[int, ...]:
    """Parameters that each layer adds, `rest` beside its attention's: a shared one at its first visit."""
    model, inner = config.model, config.model.num_inner_groups
    kinds = layer_kinds.kinds(model)
    seen: Set[Tuple[int, int]] = set()
    found = []
    for place in range(model.depth):
        key = (derived.group_of_visit(model, place // inner), place % inner)
        found.append(0 if key in seen else rest + _attention(model, kinds[place]))
        seen.add(key)
    return tuple(found)


def _mlp(config: Config) -> Network:
    from ipu_lean.data.shapes import expected_features

    width, bias = config.model.width, int(config.model.bias)
    features, classes = expected_features(config), vocab_of(config)
    layers = tuple((width if place else features) * width + bias * width for place in range(config.model.depth))
    return Network(
        layers=layers,
        boundary=width,
        hidden=width,
        saved=2 * width,  # what enters a layer, and what its activation reads
        masks=width,
        vocab=classes,
        head=width * classes + bias * classes,
        labels=1,
        input_bytes=4 * features,
    )
