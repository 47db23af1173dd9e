"""What the configuration resolves to: every rule applied, one `GPTSpec`."""

from __future__ import annotations

from typing import Any, Dict, Optional

from ipu_lean.config import Config, ModelConfig, derived, layer_kinds
from ipu_lean.data.labelled import expected_classes
from ipu_lean.errors import ConfigError
from ipu_lean.models.spec import GPTSpec, LocalSpec, LSHSpec


def spec_of(config: Config, vocab: Optional[int] = None) -> GPTSpec:
    """The numbers that the configuration resolves to.

    Attention scores are multiplied by sqrt(base head size) / head size: 1 / sqrt(head size) where heads keep their size, and the
    1 / head size of Yang et al. 2021 where they grow with width.
    """
    model, mup, memory = config.model, config.mup, config.memory
    if derived.tied(model) and mup.readout_zero_init:
        raise ConfigError(
            "a tied readout is the embedding, which does not start at zero",
            key="mup.readout_zero_init",
            value=True,
            suggestion="remove it, or set `model.tied: false`",
        )
    base = derived.base_model(config)
    size = derived.head_size(model)
    base_size = size if base is None else derived.head_size(base)
    return GPTSpec(
        **structure(with_classes(config), _rows(config, vocab)),
        dropout=model.dropout,
        attention_dropout=model.attention_dropout,
        embedding_dropout=model.embedding_dropout,
        attention=derived.attention(config),
        base_width=None if base is None else base.width,
        attention_scale=mup.attention_mult * base_size**0.5 / size,
        lsh=_lsh(model, mup.attention_mult * (base_size / size) ** 0.5),
        local=LocalSpec(model.local.chunk, model.local.before, model.local.after),
        causal=model.causal,
        seed=config.seed,
        branch_mult=derived.depth_mult(config),
        embedding_std=mup.embedding_std,
        init_scale=mup.init_scale,
        query_zero_init=derived.query_zero_init(config),
        readout_zero_init=derived.readout_zero_init(config) and not derived.tied(model),
        embedding_mult=mup.embedding_mult,
        output_mult=mup.output_mult,
        engine=derived.engine(config),
        checkpoint_every=memory.checkpoint_every,
        loss_chunk=memory.loss_chunk,
        ffn_chunk=memory.ffn_chunk,
        heads_at_once=memory.attention_heads_at_once,
        segments=derived.segments(config),
    )


def structure(model: ModelConfig, vocab: int) -> Dict[str, Any]:
    """The part of a spec that a model section says alone."""
    return {
        "width": model.width,
        "depth": model.depth,
        "heads": derived.heads(model),
        "features_per_head": derived.head_size(model),
        "kinds": layer_kinds.distinct_kinds(model),
        "ffn_width": derived.ffn_width(model),
        "vocab": vocab,
        "seq": model.seq,
        "positions": model.positions,
        "rotary_base": model.rotary_base,
        "activation": model.activation,
        "norm": model.norm,
        "norm_eps": model.norm_eps,
        "sandwich": model.sandwich,
        "bias": model.bias,
        "attention_bias": derived.attention_bias(model),
        "readout_bias": model.readout_bias,
        "axial_shape": layer_kinds.axial_shape(model),
        "axial_dims": layer_kinds.axial_dims(model),
        "tied": derived.tied(model),
        "head": model.head,
        "classes": model.classes or 0,
        "pooling": model.pooling,
        "groups": model.num_hidden_groups,
        "num_inner_groups": model.num_inner_groups,
        "stack": model.stack.kind,
        "coupling": model.stack.coupling,
        "order": model.stack.order,
        "stack_input": derived.stack_input(model.stack),
        "stack_output": derived.stack_output(model.stack),
        "beta": derived.beta(model.stack),
        "index": model.stack.index,
        "exact_bits": model.stack.exact_bits if model.stack.exact else None,
    }


def with_classes(config: Config) -> ModelConfig:
    """The model section with a classifier's number of classes in it, which the data knows if nobody says it."""
    if config.model.head != "classifier":
        return config.model
    return config.model.model_copy(update={"classes": expected_classes(config)})


def _lsh(model: ModelConfig, score_mult: float) -> LSHSpec:
    """Hashed attention. Its keys have unit length, so scores grow with the queries': as sqrt(head size), once they align."""
    lsh = model.lsh
    buckets = (lsh.buckets[0], lsh.buckets[1]) if isinstance(lsh.buckets, list) else lsh.buckets
    return LSHSpec(lsh.chunk, lsh.before, lsh.after, lsh.hashes, buckets, lsh.full_below, score_mult)


def _rows(config: Config, vocab: Optional[int]) -> int:
    """Rows of the embedding: `model.vocab`, or else the tokenizer's number (and one for a mask)."""
    known = derived.least_rows(config) if vocab is None else vocab
    wanted = config.model.vocab
    if wanted is None:
        return known
    if vocab is not None and wanted < vocab:
        raise ConfigError(
            f"the data has {vocab} different tokens, so the model needs at least that many rows",
            key="model.vocab",
            value=wanted,
            suggestion=f"remove it, or use {vocab} or more",
        )
    return wanted
