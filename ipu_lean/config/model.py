"""`model:` what is computed. Nothing in here says how memory is saved (`memory:`) or where it runs (`device:`, `ipu:`)."""

from typing import Any, List, Literal, Optional, Union

from pydantic import field_validator

from ipu_lean.config.reformer import AxialConfig, LocalConfig, LSHConfig
from ipu_lean.config.section import Section, section, setting
from ipu_lean.errors import did_you_mean

Implementation = Literal["auto", "explicit", "fused"]
Kind = Literal["full", "local", "lsh"]
IMPLEMENTATIONS = ("auto", "explicit", "fused")
KINDS = ("full", "local", "lsh")


class StackConfig(Section):
    """How the layers are joined: as residual sums, or as two streams that the backward pass can rebuild."""

    kind: Literal["residual", "reversible"] = setting(
        "reversible",
        "`residual`: h + f(h), as in GPT-2. `reversible`: two streams updated in turn (RevNet, Gomez et al. 2017), so that the "
        "inputs of each layer can be computed from its outputs and need not be kept.",
    )
    coupling: Literal["additive", "momentum", "modified-momentum", "mean", "affine"] = setting(
        "additive",
        "How a branch f enters the streams; only reversible stacks have one. `additive`: (a, b) -> (b, a + f(b)). `momentum`: "
        "v' = beta v + (1 - beta) f(x), x' = x + v' (Sander et al. 2021). `modified-momentum`: the same in revlib's coordinates. "
        "`mean`: (a, b) -> (b, (i a + f(b)) / (i + 1)). `affine`: (a, b) -> (b, sigmoid(s + 2) a + t), and each branch has a "
        "second matrix for s. docs/reversible.md has the formulas and how well each can be undone.",
    )
    order: Literal["attn-ffn", "aaff"] = setting(
        "attn-ffn",
        "`attn-ffn`: attention feeds one stream and the feed-forward the other, as in Reformer. `aaff`: two layers make one "
        "block of attention, attention, feed-forward, feed-forward, so that each stream receives both kinds (even depth only).",
    )
    input: Literal["auto", "duplicate", "zeros", "zeros-read", "split"] = setting(
        "auto",
        "How the embedding enters the two streams. `duplicate`: both are copies of it. `zeros`: the first branch reads it, and "
        "the other stream begins with zeros. `zeros-read`: the other way round, so that the first branch reads zeros (badly "
        "conditioned). `split`: each stream gets half of the features. `auto`: zeros for momentum (no velocity), else duplicate.",
    )
    output: Literal["auto", "x", "y", "sum", "sum-minus-input", "mean", "concat", "gate", "gate-channels"] = setting(
        "auto",
        "How the two streams leave: one of them, their sum, their mean, their sum minus the embedding (which both began with; "
        "the result then holds it once, beside the sum of all branches, as in lean_transformer), both side by side (twice the "
        "width for norm and readout, unless `input: split`), or g x + (1 - g) y with one learned g or one for each feature. "
        "`auto`: sum-minus-input for additive streams that began as duplicates, concat for split ones, x for the momentum forms, "
        "else sum for additive and mean for the rest.",
    )
    beta: Optional[float] = setting(
        None, "The decay of the momentum forms, between 0 and 1; 0.9 unless given. Undoing n half-steps costs a factor beta^-n."
    )
    index: Literal["stream", "global"] = setting(
        "stream",
        "What `coupling: mean` counts: what a stream has received so far (a true mean), or all half-steps (a decaying average).",
    )
    exact: bool = setting(
        False,
        "Round the embedding and every branch's output to multiples of 2^-exact_bits before they are added (additive coupling "
        "only): inverting a float32 stream is then exact at any depth. Changes what is computed, by half a step of the grid.",
    )
    exact_bits: int = setting(
        14,
        "Binary digits after the point of `exact` streams; sums are exact while streams stay below 2^(24 - exact_bits), which is "
        "checked.",
        ge=1,
        le=22,
    )


class ModelConfig(Section):
    """The network. Widths count features, depth counts layers, and a layer is one attention and one feed-forward."""

    kind: Literal["gpt", "mlp"] = setting(
        "gpt",
        "`gpt`: a pre-norm decoder that predicts the next token. `mlp`: fully connected layers that classify images "
        "(`data.images`); of this section it reads width, depth, activation (without gate), bias, dropout and features.",
    )
    width: int = setting(
        256, "Features of the residual stream (d_model). muP transfers learning rates over this number.", ge=1, le=1 << 20
    )
    depth: int = setting(
        6, "Layers executed, counted with repeats when layers are shared; of an mlp its hidden layers.", ge=1, le=1 << 16
    )
    heads: Optional[int] = setting(
        None,
        "Attention heads; their size is width / heads, so it grows with width, unless `head_size` is given as well. "
        "With neither, heads are 64 features wide (max(1, width // 64) of them).",
        ge=1,
    )
    head_size: Optional[int] = setting(
        None,
        "Features of one head; the number of heads is width / head_size, so it grows with width. With `heads` as well, attention "
        "is heads x head_size features wide inside, whatever the width is, as in Reformer.",
        ge=1,
    )
    ffn_width: Optional[int] = setting(None, "Features inside the feed-forward; `ffn_ratio` x width unless given.", ge=1)
    ffn_ratio: float = setting(
        4.0, "Features inside the feed-forward, as a multiple of width. Not read if `ffn_width` is given.", gt=0
    )
    vocab: Optional[int] = setting(
        None,
        "Rows of the embedding and of the readout; the tokenizer's number unless given. May exceed the tokenizer's (to round "
        "it up), never fall below it.",
        ge=2,
    )
    seq: int = setting(
        256, "Context length in tokens: what a training window holds, and as far back as attention looks.", ge=1, le=1 << 32
    )
    positions: Literal["rotary", "learned", "sinusoidal", "axial", "none"] = setting(
        "rotary",
        "`rotary` turns queries and keys by their position (Su et al. 2021); `learned`, `sinusoidal` and `axial` add a vector to "
        "the embedding. `axial` learns one for each row and each column of a grid of positions (`axial` below), which takes far "
        "fewer numbers for long sequences.",
    )
    rotary_base: float = setting(10000.0, "Longest wavelength of rotary and sinusoidal positions, divided by 2 pi.", gt=1)
    activation: Literal["gelu", "relu", "silu", "geglu", "swiglu", "reglu"] = setting(
        "gelu",
        "`gelu` is the tanh form on every device, because PopTorch lowers both forms to it. The `...glu` kinds multiply by a "
        "gate (Shazeer 2020) and add a third matrix of the same width.",
    )
    norm: Literal["layernorm", "rmsnorm"] = setting("layernorm", "`rmsnorm` leaves out the mean and the bias.")
    norm_eps: float = setting(1e-5, "Added to the variance before its root.", gt=0)
    sandwich: bool = setting(False, "A second norm on the output of each branch (Ding et al. 2021).")
    bias: bool = setting(True, "Biases in the linear layers.")
    tied: bool = setting(True, "The readout shares the embedding's matrix. A classifier's never does.")
    head: Literal["causal-lm", "masked-lm", "classifier"] = setting(
        "causal-lm",
        "What is predicted. `causal-lm`: the next token. `masked-lm`: tokens that are hidden from the model, from both sides, so "
        "with `causal: false` (BERT). `classifier`: the class of a text (`data.labelled`). docs/heads.md.",
    )
    classes: Optional[int] = setting(None, "Classes that a classifier tells apart. Unset: those of `data.labelled`.", ge=2)
    pooling: Literal["first", "mean"] = setting(
        "first", "What a classifier reads: the state of the `first` token, as Reformer's does, or the `mean` over all tokens."
    )
    attention_bias: Optional[bool] = setting(
        None, "Biases in the projections of the attention (query, key, value, output). Unset: as `bias`; Reformer has none."
    )
    readout_bias: bool = setting(False, "A bias in the readout, which must not be tied.")
    attention: Union[Implementation, Kind, List[Kind]] = setting(
        "auto",
        "What a token sees. `full`: every token up to itself. `local`: its own chunk and the one before (`local` below). `lsh`: "
        "those that hash like it, up to itself (Reformer; `lsh` below). A list of these is repeated over the layers, such as "
        "[local, lsh]. `auto` is `full`; so are `fused` and `explicit`, a choice of speed, not of numbers: `fused` never holds "
        "all scores (torch's scaled_dot_product_attention, or on CPU our own blocks where they are faster), `explicit` "
        "writes the softmax out, which PopTorch needs. Unless chosen so it is fused on cpu and gpu and explicit on ipu.",
    )
    causal: bool = setting(True, "A token sees itself and what comes before it only. Predicting the next token needs this.")
    lsh: LSHConfig = section(LSHConfig, "Hashed attention; only layers with `attention: lsh` read it.")
    local: LocalConfig = section(LocalConfig, "Local attention; only layers with `attention: local` read it.")
    axial: AxialConfig = section(AxialConfig, "Axial positions; only `positions: axial` reads it.")
    num_hidden_groups: Optional[int] = setting(
        None,
        "Share layers: the stack holds this many groups and walks through them in order, staying in each for an equal share "
        "of the depth (ALBERT has one). Unset: every layer has weights of its own.",
        ge=1,
    )
    num_inner_groups: int = setting(1, "Layers in a group; each visit to a group runs all of them, so this divides depth.", ge=1)
    features: Optional[int] = setting(
        None, "Numbers in one image, which an mlp takes in. Unset: as many as `data.images` has (28 x 28 = 784).", ge=1
    )
    dropout: float = setting(
        0.0, "Share of a branch's output (of an mlp's hidden layer) that is dropped in training.", ge=0, lt=1
    )
    attention_dropout: float = setting(0.0, "Share of the attention weights that is dropped in training.", ge=0, lt=1)
    embedding_dropout: float = setting(0.0, "Share of the embedded tokens' features that is dropped in training.", ge=0, lt=1)
    stack: StackConfig = section(StackConfig, "How the layers are joined.")

    @field_validator("attention", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        known = KINDS if isinstance(value, list) else (*IMPLEMENTATIONS, *KINDS)
        wrong = [one for one in (value if isinstance(value, list) else [value]) if one not in known]
        if wrong:
            near = did_you_mean(str(wrong[0]), known)
            hint = f" (did you mean `{near}`?)" if near else ""
            raise ValueError(f"this must be one of {', '.join(known)}{hint}")
        if not value:
            raise ValueError("this is a kind of attention, or a list of at least one")
        return value
