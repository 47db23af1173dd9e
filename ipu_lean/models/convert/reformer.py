"""Reformer checkpoints of transformers: their config.json as a `model` section and back, and which tensor is which."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from ipu_lean.config import Config, derived, layer_kinds
from ipu_lean.errors import ConfigError, as_written
from ipu_lean.models.convert.parts import Part
from ipu_lean.models.convert.settings import Settings, only
from ipu_lean.models.spec import GPTSpec

ARCHITECTURES = {
    "ReformerModelWithLMHead": "causal-lm",
    "ReformerForMaskedLM": "masked-lm",
    "ReformerForSequenceClassification": "classifier",
}
ACTIVATIONS = {"relu": "relu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "silu": "silu", "swish": "silu"}
CONSTANTS = ("self_mask_value_float16", "self_mask_value_float32", "mask_value_float16", "mask_value_float32")
"""Buffers with fixed contents that older checkpoints hold."""


def model_section(settings: Settings) -> Dict[str, Any]:
    """The `model` section of a config.json. ConfigError for a setting that has no counterpart here, by its name."""
    head = settings.one_of("architectures", ARCHITECTURES, default=["ReformerModelWithLMHead"])
    kinds = list(settings.take("attn_layers", ["local", "lsh"] * 3))
    for kind in kinds:
        only("attn_layers", kind, ("local", "lsh"))
    only("tie_word_embeddings", settings.take("tie_word_embeddings", False), (False,), "the readout reads twice the width")
    causal = bool(settings.take("is_decoder", False))
    if causal != (head == "causal-lm"):
        only("is_decoder", causal, (head == "causal-lm",), f"the head is {head}")
    section: Dict[str, Any] = {
        "width": settings.take("hidden_size", 256),
        "depth": len(kinds),
        "heads": settings.take("num_attention_heads", 12),
        "head_size": settings.take("attention_head_size", 64),
        "ffn_width": settings.take("feed_forward_size", 512),
        "vocab": settings.take("vocab_size", 320),
        "activation": settings.one_of("hidden_act", ACTIVATIONS, default="relu"),
        "norm_eps": settings.take("layer_norm_eps", 1e-12),
        "attention": kinds,
        "attention_bias": False,
        "tied": False,
        "stack": {"kind": "reversible", "output": "concat"},
        **_positions(settings),
        **_dropout(settings, kinds),
    }
    if head != "causal-lm":
        section.update(causal=False, head=head)
    if head == "classifier":
        section["classes"] = _classes(settings)
    else:
        section["readout_bias"] = True
    if "lsh" in kinds:
        buckets = settings.take("num_buckets", None)
        section["lsh"] = {**_chunks(settings, "lsh"), "hashes": settings.take("num_hashes", 1), "buckets": buckets}
    if "local" in kinds:
        section["local"] = _chunks(settings, "local")
    return section


def _classes(settings: Settings) -> int:
    """Their number. Here a label's number is its place among all labels of the data, whatever the checkpoint calls it."""
    only("problem_type", settings.take("problem_type", None), (None, "single_label_classification"), "a text has one class")
    names = settings.take("id2label", {"0": "LABEL_0", "1": "LABEL_1"})
    listed = [f"{number} is {names[number]}" for number in sorted(names, key=int)]
    shown = ", ".join([*listed[:4], "…"] if len(listed) > 4 else listed)
    settings.remark(
        f"label texts 0, 1, … as the checkpoint does ({shown}), at least one of each: here the order of the labels "
        "in data.labelled gives their numbers"
    )
    return len(names)


def _chunks(settings: Settings, kind: str) -> Dict[str, Any]:
    return {
        "chunk": settings.take(f"{kind}_attn_chunk_length", 64),
        "before": settings.take(f"{kind}_num_chunks_before", 1),
        "after": settings.take(f"{kind}_num_chunks_after", 0),
    }


def _positions(settings: Settings) -> Dict[str, Any]:
    longest = settings.take("max_position_embeddings", 4096)
    if not settings.take("axial_pos_embds", True):
        return {"positions": "learned", "seq": longest}
    shape = list(settings.take("axial_pos_shape", [64, 64]))
    dims = list(settings.take("axial_pos_embds_dim", [64, 192]))
    if len(shape) != 2 or len(dims) != 2:
        only("axial_pos_shape", shape, (), "two axes are what there is here")
    return {"positions": "axial", "axial": {"shape": shape, "dims": dims}, "seq": min(longest, shape[0] * shape[1])}


def _dropout(settings: Settings, kinds: List[str]) -> Dict[str, Any]:
    """Their places differ a little (docs/convert.md); they matter for further training only."""
    hidden = settings.take("hidden_dropout_prob", 0.05)
    rates = {"local": 0.05, "lsh": 0.0}
    attention = [settings.take(f"{kind}_attention_probs_dropout_prob", rate) for kind, rate in rates.items() if kind in kinds]
    if len(set(attention)) > 1:
        settings.remark(f"attention_dropout is {min(attention)} for every layer; the checkpoint has {attention} (local, lsh)")
    return {"dropout": hidden, "embedding_dropout": hidden, "attention_dropout": min(attention)}


def settings_of(config: Config, spec: GPTSpec, end: Optional[int]) -> Dict[str, Any]:
    """config.json of a model of ours. ConfigError for what transformers' Reformer has not, by its key."""
    model = config.model
    _check(config)
    kinds = list(layer_kinds.kinds(model))
    causal = model.causal
    architecture = next(name for name, head in ARCHITECTURES.items() if head == model.head)
    activation = next(name for name, ours in ACTIVATIONS.items() if ours == model.activation)
    shape, dims = (layer_kinds.axial_shape(model), layer_kinds.axial_dims(model))
    axial = {"axial_pos_shape": list(shape), "axial_pos_embds_dim": list(dims)} if model.positions == "axial" else {}
    buckets = model.lsh.buckets
    names = {str(label): f"LABEL_{label}" for label in range(spec.classes or 0)} if model.head == "classifier" else {}
    labels = {"id2label": names, "label2id": {name: int(label) for label, name in names.items()}} if names else {}
    return {
        "model_type": "reformer",
        "architectures": [architecture],
        "hidden_size": model.width,
        "attn_layers": kinds,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": derived.heads(model),
        "attention_head_size": derived.head_size(model),
        "feed_forward_size": derived.ffn_width(model),
        "vocab_size": spec.vocab,
        "hidden_act": activation,
        "layer_norm_eps": model.norm_eps,
        "is_decoder": causal,
        "tie_word_embeddings": False,
        "max_position_embeddings": model.seq,
        "axial_pos_embds": model.positions == "axial",
        **axial,
        **{f"{kind}_attn_chunk_length": getattr(model, kind).chunk for kind in ("lsh", "local")},
        **{f"{kind}_num_chunks_before": getattr(model, kind).before for kind in ("lsh", "local")},
        **{f"{kind}_num_chunks_after": getattr(model, kind).after for kind in ("lsh", "local")},
        **{f"{kind}_attention_probs_dropout_prob": model.attention_dropout for kind in ("lsh", "local")},
        "hidden_dropout_prob": model.dropout,
        "num_hashes": model.lsh.hashes,
        "num_buckets": list(buckets) if isinstance(buckets, (list, tuple)) else buckets,
        "hash_seed": None,
        "eos_token_id": end,
        "pad_token_id": 0,
        "use_cache": causal,
        "dtype": "float32",
        **labels,
    }


def _check(config: Config) -> None:
    """What transformers' Reformer can be."""
    model, stack = config.model, config.model.stack
    _need("model.stack.kind", stack.kind, ("reversible",))
    _need("model.stack.coupling", stack.coupling, ("additive",))
    _need("model.stack.order", stack.order, ("attn-ffn",))
    _need("model.stack.input", derived.stack_input(stack), ("duplicate",))
    _need("model.stack.output", derived.stack_output(stack), ("concat",))
    _need("model.stack.exact", stack.exact, (False,))
    _need("model.norm", model.norm, ("layernorm",))
    _need("model.sandwich", model.sandwich, (False,))
    _need("model.bias", model.bias, (True,))
    _need("model.attention_bias", derived.attention_bias(model), (False,))
    _need("model.tied", model.tied, (False,))
    _need("model.positions", model.positions, ("axial", "learned"))
    _need("model.activation", model.activation, tuple(sorted(set(ACTIVATIONS.values()))))
    if model.head == "classifier":
        _need("model.pooling", model.pooling, ("first",))
    _need("model.num_hidden_groups", model.num_hidden_groups, (None,))
    for kind in layer_kinds.kinds(model):
        _need("model.attention", kind, ("local", "lsh"))
    for kind in ("local", "lsh"):
        if model.causal and layer_kinds.uses(model, kind):
            _need(f"model.{kind}.after", getattr(model, kind).after, (0,))
    if layer_kinds.uses(model, "lsh"):
        _need("model.lsh.full_below", layer_kinds.full_below(model), (model.lsh.chunk,))
    _need("model.head", model.head, tuple(ARCHITECTURES.values()))


def _need(key: str, value: Any, allowed: Tuple[Any, ...]) -> None:
    if value not in allowed:
        words = " or ".join(one if isinstance(one, str) else as_written(one) for one in allowed)
        raise ConfigError(f"transformers' Reformer has no such thing: only {words} can be written", key=key, value=value)


def parts_of(spec: GPTSpec) -> List[Part]:
    """Which tensor is which, for a model of ours that `settings_of` or `model_section` describes."""
    found = [Part("reformer.embeddings.word_embeddings.weight", ("embedding.token.weight",))]
    if spec.positions == "axial":
        for axis, name in enumerate(("rows", "columns")):
            found.append(Part(f"reformer.embeddings.position_embeddings.weights.{axis}", (f"embedding.position.{name}",)))
    else:
        found.append(Part("reformer.embeddings.position_embeddings.embedding.weight", ("embedding.position.weight",)))
    for layer, kind in enumerate(spec.kinds):
        theirs, ours = f"reformer.encoder.layers.{layer}", f"layers.blocks.{layer}.branches"
        projections = ("query_key", "value") if kind == "lsh" else ("query", "key", "value")
        for name in projections:
            found.append(Part(f"{theirs}.attention.self_attention.{name}.weight", (f"{ours}.0.attention.{name}.linear.weight",)))
        found.append(Part(f"{theirs}.attention.output.dense.weight", (f"{ours}.0.attention.out.linear.weight",)))
        for tensor in ("weight", "bias"):
            found.append(Part(f"{theirs}.attention.layer_norm.{tensor}", (f"{ours}.0.norm.{tensor}",)))
            found.append(Part(f"{theirs}.feed_forward.layer_norm.{tensor}", (f"{ours}.1.norm.{tensor}",)))
            found.append(Part(f"{theirs}.feed_forward.dense.dense.{tensor}", (f"{ours}.1.feed_forward.up.linear.{tensor}",)))
            found.append(Part(f"{theirs}.feed_forward.output.dense.{tensor}", (f"{ours}.1.feed_forward.down.linear.{tensor}",)))
    for tensor in ("weight", "bias"):
        found.append(Part(f"reformer.encoder.layer_norm.{tensor}", (f"norm.{tensor}",)))
        if spec.head == "classifier":
            found.append(Part(f"classifier.dense.{tensor}", (f"readout.dense.linear.{tensor}",)))
            found.append(Part(f"classifier.out_proj.{tensor}", (f"readout.projection.{tensor}",)))
        else:
            found.append(Part(f"lm_head.decoder.{tensor}", (f"readout.{tensor}",)))
    return found
