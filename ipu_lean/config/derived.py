"""Numbers that follow from the configuration: pure functions, so that every room derives them the same way."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

from ipu_lean.config.data import TokenizerConfig
from ipu_lean.config.model import ModelConfig, StackConfig
from ipu_lean.config.root import Config

BYTES_VOCAB = 257  # 256 bytes and the end-of-text token
TRAINED_VOCAB = 4096


def stack_input(stack: StackConfig) -> str:
    """model.stack.input with `auto` resolved: the momentum network begins without velocity."""
    if stack.input != "auto":
        return stack.input
    return "zeros" if stack.coupling == "momentum" else "duplicate"


def stack_output(stack: StackConfig) -> str:
    """model.stack.output with `auto` resolved: what holds the input and all branches about equally."""
    if stack.output != "auto":
        return stack.output
    if stack_input(stack) == "split":
        return "concat"
    if stack.coupling in ("momentum", "modified-momentum"):
        return "x"
    if stack.coupling == "additive":
        return "sum-minus-input" if stack_input(stack) == "duplicate" else "sum"
    return "mean"


def beta(stack: StackConfig) -> Optional[float]:
    """model.stack.beta: 0.9 unless given; None for couplings that have none."""
    if stack.coupling not in ("momentum", "modified-momentum"):
        return None
    return 0.9 if stack.beta is None else stack.beta


def stack_width(model: ModelConfig) -> int:
    """Features of what a branch reads and writes: half of the width if the embedding is split into the two streams."""
    halved = model.stack.kind == "reversible" and stack_input(model.stack) == "split"
    return model.width // 2 if halved else model.width


def hidden_width(model: ModelConfig) -> int:
    """Features that leave the stack, for the final norm and the readout."""
    concat = model.stack.kind == "reversible" and stack_output(model.stack) == "concat"
    return 2 * stack_width(model) if concat else stack_width(model)


def heads(model: ModelConfig) -> int:
    """Number of attention heads."""
    if model.heads is not None:
        return model.heads
    if model.head_size is not None:
        return stack_width(model) // model.head_size
    return max(1, stack_width(model) // 64)


def head_size(model: ModelConfig) -> int:
    """Features of one attention head."""
    return model.head_size if model.head_size is not None else stack_width(model) // heads(model)


def attention_width(model: ModelConfig) -> int:
    """Features inside the attention, heads x head size: the width unless both are given."""
    return heads(model) * head_size(model)


def attention_bias(model: ModelConfig) -> bool:
    """Whether the projections of the attention have biases."""
    return model.bias if model.attention_bias is None else model.attention_bias


def ffn_width(model: ModelConfig) -> int:
    """Features inside the feed-forward."""
    return model.ffn_width if model.ffn_width is not None else int(round(model.ffn_ratio * stack_width(model)))


def visits(model: ModelConfig) -> int:
    """Visits to layer groups in one forward pass; each runs `num_inner_groups` layers."""
    return model.depth // model.num_inner_groups


def groups(model: ModelConfig) -> int:
    """Distinct groups of layers: one per visit unless layers are shared."""
    return visits(model) if model.num_hidden_groups is None else model.num_hidden_groups


def group_of_visit(model: ModelConfig, visit: int) -> int:
    """Which group a visit uses: equal stays, in order (the layout of ALBERT and lean_transformer)."""
    return visit * groups(model) // visits(model)


def tied(model: ModelConfig) -> bool:
    """Whether the readout is the embedding's matrix."""
    return model.tied and model.kind == "gpt" and model.head != "classifier"


def labels_per_row(model: ModelConfig) -> int:
    """Labels in one row of a batch: one at each position, or the one class of an image or a text."""
    return model.seq if model.kind == "gpt" and model.head != "classifier" else 1


def is_mup(config: Config) -> bool:
    """Whether multipliers follow the width."""
    return config.mup.parametrization == "mup"


def depth_mult(config: Config) -> float:
    """CompleteP's branch multiplier, base_depth / depth; 1 without the rule."""
    if config.model.kind == "mlp":
        return 1.0  # it has no branches
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
    """The same network at another width: ratios (and `heads`) stay, `ffn_width` and `axial.dims` scale along."""
    changes: Dict[str, Any] = {"width": width}
    if model.ffn_width is not None:
        changes["ffn_width"] = max(1, int(round(model.ffn_width * width / model.width)))
    if model.axial.dims is not None:
        rows = min(max(1, int(round(model.axial.dims[0] * width / model.width))), width - 1)
        changes["axial"] = model.axial.model_copy(update={"dims": [rows, width - rows]})
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
    if config.model.kind == "mlp" or config.device in ("ipu", "ipu-emulated"):
        return "store"
    return "invert" if config.model.stack.kind == "reversible" else "store"


def surrogate(config: Config) -> bool:
    """Whether the step that an IPU runs holds its own backward pass."""
    return config.device in ("ipu", "ipu-emulated") and config.memory.ipu_backward == "surrogate"


def inverts(config: Config) -> bool:
    """Whether the backward pass rebuilds the inputs of layers from their outputs."""
    return config.model.stack.kind == "reversible" and (surrogate(config) or _some_inverted(config))


def _some_inverted(config: Config) -> bool:
    found = segments(config)
    return engine(config) == "invert" if found is None else any(kind == "invert" for _, kind, _ in found)


def inverted_layers(config: Config) -> int:
    """Layers in the longest run that is rebuilt from what comes after it: rounding adds up over these."""
    found = segments(config)
    if found is None or surrogate(config):
        return config.model.depth
    return max((layers for layers, kind, _ in found if kind == "invert"), default=0)


def segments(config: Config) -> Optional[Tuple[Tuple[int, str, int], ...]]:
    """(layers, engine, checkpoint_every) of each part of the stack: memory.segments, or what memory.keep_last leaves; None if one
    engine does for all.
    """
    memory, depth = config.memory, config.model.depth
    if memory.segments is not None:
        return tuple((part.layers, part.engine, part.checkpoint_every) for part in memory.segments)
    if not memory.keep_last:
        return None
    kept = min(memory.keep_last, depth)
    first = ((depth - kept, engine(config), memory.checkpoint_every),) if kept < depth else ()
    return (*first, (kept, "store", 1))


def attention(config: Config) -> str:
    """`fused` or `explicit`: how attention of every kind is computed, as model.attention says or as the device has it."""
    if config.model.attention in ("fused", "explicit"):
        return str(config.model.attention)
    return "explicit" if config.device in ("ipu", "ipu-emulated") else "fused"


def tokenizer_vocab(tokenizer: TokenizerConfig) -> int:
    """Pieces of the tokenizer to be used or trained (a loaded one knows its own number)."""
    if tokenizer.kind == "bytes":
        return BYTES_VOCAB
    return TRAINED_VOCAB if tokenizer.vocab is None else tokenizer.vocab


def extra_rows(model: ModelConfig) -> int:
    """Rows of the embedding that no piece of the tokenizer has: the mask's."""
    return 1 if model.head == "masked-lm" else 0


def least_rows(config: Config) -> int:
    """Rows that the embedding needs (a loaded tokenizer knows its own number of pieces)."""
    return tokenizer_vocab(config.data.tokenizer) + extra_rows(config.model)


def horizon(config: Config) -> int:
    """Updates over which the schedule runs."""
    return config.train.steps if config.schedule.steps is None else config.schedule.steps


def strategy(config: Config) -> str:
    """`single`, `ddp` or `fsdp`: train.strategy with `auto` resolved."""
    if config.train.strategy != "auto":
        return config.train.strategy
    return "single" if config.train.processes == 1 else "ddp"
