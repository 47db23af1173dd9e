"""What a GPT is once every rule of the configuration has been applied: plain numbers, no muP left to decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple, Union

from ipu_lean.config.layer_kinds import legal_length


@dataclass(frozen=True)
class LSHSpec:
    """Hashed attention, see `LSHSelfAttention`; fields as in `model.lsh`, and score_mult, which multiplies the scores."""

    chunk: int = 64
    before: int = 1
    after: int = 0
    hashes: int = 1
    buckets: Union[None, int, Tuple[int, int]] = None
    full_below: Optional[int] = None
    score_mult: float = 1.0


@dataclass(frozen=True)
class LocalSpec:
    """Local attention, see `LocalSelfAttention`; fields as in `model.local`."""

    chunk: int = 64
    before: int = 1
    after: int = 0


@dataclass(frozen=True)
class GPTSpec:
    """A resolved GPT. Sizes count features, tokens or layers; the field names are those of the configuration's `model` section.

    Attributes beyond it:
        base_width: width of the muP base, which the readout divides by; None: multiplier 1.
        attention_scale: multiplies the attention scores; None: 1 / sqrt(head size).
        branch_mult: multiplies the output of each attention and feed-forward (CompleteP's base depth / depth).
        exact_bits: streams on a grid of 2^-exact_bits; None: not on a grid.
        groups: distinct groups of layers; visit i of depth / num_inner_groups runs group i * groups // visits. None: no sharing.
        embedding_std, init_scale, query_zero_init, readout_zero_init: initialisation, see `nn/`.
        embedding_mult, output_mult: multiply the embedded tokens and the logits.
        engine, checkpoint_every, loss_chunk: how memory is saved (loss_chunk None: automatic; 0: not chunked).
        ffn_chunk, heads_at_once: tokens in a chunk of the feed-forward and heads in a group of the attention; 0: all at once.
        segments: (layers, engine, checkpoint_every) of parts of the stack, in place of one engine for all.
        classes: of a classifier; 0 for language models.
        attention: how it is computed: `explicit`, `fused` or `torch`, see `CausalSelfAttention`.
        kinds: `full`, `local` or `lsh` for each layer with weights of its own, group by group; empty: all full.
        lsh, local: what layers of these kinds are like.
        features_per_head: size of a head where heads x size is not the width of a stream; None: width / heads.
        attention_bias: biases of its projections; None: as `bias`. readout_bias: of an untied readout.
        axial_shape, axial_dims: the grid of axial positions and the features of its two tables.
        seed: what the random directions of hashing are drawn from.
    """

    width: int
    depth: int
    heads: int
    ffn_width: int
    vocab: int
    seq: int
    positions: str = "rotary"
    rotary_base: float = 10000.0
    activation: str = "gelu"
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    sandwich: bool = False
    bias: bool = True
    tied: bool = True
    head: str = "causal-lm"
    classes: int = 0
    pooling: str = "first"
    groups: Optional[int] = None
    num_inner_groups: int = 1
    dropout: float = 0.0
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    stack: str = "reversible"
    coupling: str = "additive"
    order: str = "attn-ffn"
    stack_input: str = "duplicate"
    stack_output: str = "sum-minus-input"
    beta: Optional[float] = None
    index: str = "stream"
    exact_bits: Optional[int] = None
    attention: str = "fused"
    base_width: Optional[int] = None
    attention_scale: Optional[float] = None
    branch_mult: float = 1.0
    embedding_std: float = 0.1
    init_scale: float = 1.0
    query_zero_init: bool = False
    readout_zero_init: bool = False
    embedding_mult: float = 1.0
    output_mult: float = 1.0
    engine: str = "store"
    checkpoint_every: int = 1
    loss_chunk: Optional[int] = None
    ffn_chunk: int = 0
    heads_at_once: int = 0
    segments: Optional[Tuple[Tuple[int, str, int], ...]] = None
    kinds: Tuple[str, ...] = ()
    causal: bool = True
    lsh: LSHSpec = LSHSpec()
    local: LocalSpec = LocalSpec()
    features_per_head: Optional[int] = None
    attention_bias: Optional[bool] = None
    readout_bias: bool = False
    axial_shape: Tuple[int, int] = (1, 1)
    axial_dims: Tuple[int, int] = (1, 1)
    seed: int = 0

    @property
    def head_size(self) -> int:
        """Features of one head."""
        return self.stack_width // self.heads if self.features_per_head is None else self.features_per_head

    def padded_length(self, length: int) -> int:
        """Tokens that the layers see of a sequence of `length`: itself if every layer can take it, else the next that all can."""
        limits = {"local": (self.local.chunk,) * 2, "lsh": (self.lsh.full_below or self.lsh.chunk, self.lsh.chunk)}
        return legal_length(length, [limits[kind] for kind in limits if kind in self.kinds])

    @property
    def stack_width(self) -> int:
        """Features of what a branch reads and writes."""
        return self.width // 2 if self.stack == "reversible" and self.stack_input == "split" else self.width

    @property
    def hidden_width(self) -> int:
        """Features that leave the stack."""
        return 2 * self.stack_width if self.stack == "reversible" and self.stack_output == "concat" else self.stack_width

    @property
    def hidden_base(self) -> Optional[int]:
        """`hidden_width` of the muP base, which the readout divides by; None: multiplier 1."""
        return None if self.base_width is None else self.hidden_width * self.base_width // self.width

    @property
    def visits(self) -> int:
        """Visits to groups of layers in one forward pass."""
        return self.depth // self.num_inner_groups
