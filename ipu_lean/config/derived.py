"""Numbers that follow from the configuration: pure functions, so that every room derives them the same way."""

from __future__ import annotations

from typing import Optional

from ipu_lean.config.data import TokenizerConfig
from ipu_lean.config.model import ModelConfig
from ipu_lean.config.root import Config

BYTES_VOCAB = 257  # 256 bytes and the end-of-text token
TRAINED_VOCAB = 4096


def heads(model: ModelConfig) -> int:
    """Number of attention heads."""
    if model.heads is not None:
        return model.heads
    if model.head_size is not None:
        return model.width // model.head_size
    return max(1, model.width // 64)


def head_size(model: ModelConfig) -> int:
    """Features of one attention head."""
    return model.head_size if model.head_size is not None else model.width // heads(model)


def ffn_width(model: ModelConfig) -> int:
    """Features inside the feed-forward."""
    return model.ffn_width if model.ffn_width is not None else int(round(model.ffn_ratio * model.width))


def visits(model: ModelConfig) -> int:
    """Visits to layer groups in one forward pass; each runs `num_inner_groups` layers."""
    return model.depth // model.num_inner_groups


def groups(model: ModelConfig) -> int:
    """Distinct groups of layers: one per visit unless layers are shared."""
    return visits(model) if model.num_hidden_groups is None else model.num_hidden_groups


def group_of_visit(model: ModelConfig, visit: int) -> int:
    """Which group a visit uses: equal stays, in order (the layout of ALBERT and lean_transformer)."""
    return visit * groups(model) // visits(model)


def is_mup(config: Config) -> bool:
    """Whether multipliers follow the width."""
    return config.mup.parametrization == "mup"


def depth_mult(config: Config) -> float:
    """CompleteP's branch multiplier, base_depth / depth; 1 without the rule."""
    rule = config.mup.depth_rule
    completep = rule == "completep" or (rule == "auto" and is_mup(config))
    return config.mup.base_depth / config.model.depth if completep else 1.0


def readout_zero_init(config: Config) -> bool:
    """Whether the readout starts at zero."""
    return is_mup(config) if config.mup.readout_zero_init is None else config.mup.readout_zero_init


def query_zero_init(config: Config) -> bool:
    """Whether the query projections start at zero."""
    return is_mup(config) if config.mup.query_zero_init is None else config.mup.query_zero_init


def at_width(model: ModelConfig, width: int) -> ModelConfig:
    """The same network at another width: what is written as a ratio (or as `heads`) stays, `ffn_width` scales along."""
    changes = {"width": width}
    if model.ffn_width is not None:
        changes["ffn_width"] = max(1, int(round(model.ffn_width * width / model.width)))
    return model.model_copy(update=changes)


def base_model(config: Config) -> Optional[ModelConfig]:
    """The model section at muP's base, or None under the standard parametrisation."""
    if not is_mup(config):
        return None
    if config.mup.base is not None:
        return config.mup.base
    assert config.mup.base_width is not None  # checks.py has seen to it
    return at_width(config.model, config.mup.base_width)


def engine(config: Config) -> str:
    """`store`, `invert` or `checkpoint`: memory.engine with `auto` resolved. PopTorch ignores Python's backward code, so on an
    IPU the plain operations of `store` are traced, and PopART recomputes.
    """
    if config.memory.engine != "auto":
        return config.memory.engine
    if config.device in ("ipu", "ipu-emulated"):
        return "store"
    return "invert" if config.model.stack.kind == "reversible" else "store"


def attention(config: Config) -> str:
    """`fused` or `explicit`: model.attention with `auto` resolved."""
    if config.model.attention != "auto":
        return config.model.attention
    return "explicit" if config.device in ("ipu", "ipu-emulated") else "fused"


def tokenizer_vocab(tokenizer: TokenizerConfig) -> int:
    """Pieces of the tokenizer to be used or trained (a loaded one knows its own number)."""
    if tokenizer.kind == "bytes":
        return BYTES_VOCAB
    return TRAINED_VOCAB if tokenizer.vocab is None else tokenizer.vocab


def horizon(config: Config) -> int:
    """Updates over which the schedule runs."""
    return config.train.steps if config.schedule.steps is None else config.schedule.steps


def strategy(config: Config) -> str:
    """`single`, `ddp` or `fsdp`: train.strategy with `auto` resolved."""
    if config.train.strategy != "auto":
        return config.train.strategy
    return "single" if config.train.processes == 1 else "ddp"
