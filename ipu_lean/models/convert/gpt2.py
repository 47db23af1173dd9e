"""GPT-2 checkpoints of transformers: their config.json as a `model` section and back, and which tensor is which."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from ipu_lean.config import Config, derived, layer_kinds
from ipu_lean.errors import ConfigError, as_written
from ipu_lean.models.convert.parts import Part
from ipu_lean.models.convert.settings import Settings, only
from ipu_lean.models.spec import GPTSpec

ARCHITECTURES = {"GPT2LMHeadModel": "causal-lm"}
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"}
UNTIED = Part("lm_head.weight", ("readout.weight",))
CONSTANTS = ("masked_bias",)
"""Last words of buffers with fixed contents that older checkpoints hold; `attn.bias`, the causal mask, is one more."""


def model_section(settings: Settings) -> Dict[str, Any]:
    """The `model` section of a config.json. ConfigError for a setting that has no counterpart here, by its name."""
    settings.one_of("architectures", ARCHITECTURES, default=["GPT2LMHeadModel"])
    for name, value in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False)):
        only(name, settings.take(name, value), (value,))
    width = settings.take("n_embd", 768)
    return {
        "width": width,
        "depth": settings.take("n_layer", 12),
        "heads": settings.take("n_head", 12),
        "ffn_width": settings.take("n_inner", None) or 4 * width,
        "vocab": settings.take("vocab_size", 50257),
        "seq": settings.take("n_positions", 1024),
        "positions": "learned",
        "activation": settings.one_of("activation_function", ACTIVATIONS, default="gelu_new"),
        "norm_eps": settings.take("layer_norm_epsilon", 1e-5),
        "tied": bool(settings.take("tie_word_embeddings", True)),
        "dropout": settings.take("resid_pdrop", 0.1),
        "attention_dropout": settings.take("attn_pdrop", 0.1),
        "embedding_dropout": settings.take("embd_pdrop", 0.1),
        "stack": {"kind": "residual"},
    }


def settings_of(config: Config, spec: GPTSpec, end: Optional[int]) -> Dict[str, Any]:
    """config.json of a model of ours. ConfigError for what GPT-2 has not, by its key."""
    model = config.model
    _need("model.stack.kind", model.stack.kind, ("residual",))
    _need("model.norm", model.norm, ("layernorm",))
    _need("model.sandwich", model.sandwich, (False,))
    _need("model.bias", model.bias, (True,))
    _need("model.attention_bias", derived.attention_bias(model), (True,))
    _need("model.readout_bias", model.readout_bias, (False,))
    _need("model.positions", model.positions, ("learned",))
    _need("model.activation", model.activation, tuple(sorted(set(ACTIVATIONS.values()))))
    _need("model.num_hidden_groups", model.num_hidden_groups, (None,))
    _need("model.head", model.head, ("causal-lm",))
    for kind in layer_kinds.kinds(model):
        _need("model.attention", kind, ("full",))
    if derived.attention_width(model) != model.width:
        _need("model.head_size", model.head_size, (model.width // derived.heads(model),))
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": model.width,
        "n_layer": model.depth,
        "n_head": derived.heads(model),
        "n_inner": None if derived.ffn_width(model) == 4 * model.width else derived.ffn_width(model),
        "n_positions": model.seq,
        "vocab_size": spec.vocab,
        "activation_function": next(name for name, ours in ACTIVATIONS.items() if ours == model.activation),
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "resid_pdrop": model.dropout,
        "attn_pdrop": model.attention_dropout,
        "embd_pdrop": model.embedding_dropout,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": "float32",
    }


def _need(key: str, value: Any, allowed: Tuple[Any, ...]) -> None:
    if value not in allowed:
        words = " or ".join(one if isinstance(one, str) else as_written(one) for one in allowed)
        raise ConfigError(f"transformers' GPT-2 has no such thing: only {words} can be written", key=key, value=value)


def parts_of(spec: GPTSpec) -> List[Part]:
    """Which tensor is which. Their linear layers hold `[in, out]`, and query, key and value are one."""
    found = [
        Part("transformer.wte.weight", ("embedding.token.weight",)),
        Part("transformer.wpe.weight", ("embedding.position.weight",)),
    ]
    for layer in range(spec.depth):
        theirs, ours = f"transformer.h.{layer}", f"layers.blocks.{layer}.branches"
        for tensor in ("weight", "bias"):
            turned = tensor == "weight"
            three = tuple(f"{ours}.0.attention.{name}.linear.{tensor}" for name in ("query", "key", "value"))
            found.append(Part(f"{theirs}.attn.c_attn.{tensor}", three, turned))
            found.append(Part(f"{theirs}.attn.c_proj.{tensor}", (f"{ours}.0.attention.out.linear.{tensor}",), turned))
            found.append(Part(f"{theirs}.mlp.c_fc.{tensor}", (f"{ours}.1.feed_forward.up.linear.{tensor}",), turned))
            found.append(Part(f"{theirs}.mlp.c_proj.{tensor}", (f"{ours}.1.feed_forward.down.linear.{tensor}",), turned))
            found.append(Part(f"{theirs}.ln_1.{tensor}", (f"{ours}.0.norm.{tensor}",)))
            found.append(Part(f"{theirs}.ln_2.{tensor}", (f"{ours}.1.norm.{tensor}",)))
    for tensor in ("weight", "bias"):
        found.append(Part(f"transformer.ln_f.{tensor}", (f"norm.{tensor}",)))
    if not spec.tied:
        found.append(UNTIED)
    return found
