"""`memory:` how activations and gradients save memory. Never changes the numbers beyond rounding."""

from typing import List, Literal, Optional

from ipu_lean.config.section import Section, setting


class SegmentConfig(Section):
    """Some layers in a row, and how their activations are saved."""

    layers: int = setting(1, "How many, counted with repeats of shared layers.", ge=1)
    engine: Literal["store", "invert", "checkpoint"] = setting("checkpoint", "As memory.engine, which knows what these do.")
    checkpoint_every: int = setting(1, "Layers between two checkpoints; only `engine: checkpoint` reads it.", ge=1)


class MemoryConfig(Section):
    """What the backward pass keeps, and what it computes again."""

    engine: Literal["auto", "store", "invert", "checkpoint"] = setting(
        "auto",
        "`store` keeps every activation; `invert` keeps none and rebuilds each layer's input from its output (reversible "
        "stacks only); `checkpoint` keeps the inputs of segments and runs them again. `auto`: invert for reversible stacks, "
        "store for residual ones.",
    )
    allow_ill_conditioned: bool = setting(
        False,
        "Invert also where rounding is predicted to spoil the gradients (more than 1e-3 of them, or more than 16-bit branches "
        "cost anyway), and allow `model.stack.input: zeros-read`.",
    )
    checkpoint_every: int = setting(1, "Layers in a checkpointed segment; only `engine: checkpoint` reads it.", ge=1)
    fused_update: bool = setting(
        False,
        "Update each weight in the backward pass, as its gradient completes, and free the gradient: never are all gradients "
        "alive. The same numbers. Needs torch 2.1, `train.clip: null` and no accumulation (docs/memory.md).",
    )
    loss_chunk: Optional[int] = setting(
        None,
        "Tokens whose logits are alive at once in the loss. Unset: chosen from the vocabulary. 0: all of them, never chunked. "
        "(Of a classifier: texts and classes; its head's dropout drops others in chunks.)",
        ge=0,
    )
    ipu_backward: Literal["recompute", "surrogate"] = setting(
        "recompute",
        "How a stack saves memory on IPUs. `recompute`: PopART keeps what enters each layer and computes the rest again. "
        "`surrogate`: nothing is kept; the step walks a reversible stack backwards itself and hands PopTorch the gradients (one "
        "IPU, or `ipu.execution: sharded`; replicas as usual). Other devices do not read it.",
    )
    ffn_chunk: int = setting(
        0,
        "Tokens whose feed-forward is computed at once, in both passes: of the activations in between (ffn_ratio times the "
        "width and more) only theirs are alive. 0: all tokens of a micro-batch. A few hundred cost no time.",
        ge=0,
    )
    attention_heads_at_once: int = setting(
        0,
        "Heads whose attention is computed at once, in both passes; a head of each sequence counts as one. A multiple of the "
        "heads takes that many sequences at a time, less than the heads takes a sequence in groups of its heads. 0: all. The "
        "numbers differ by rounding; with attention_dropout, other weights are dropped than without groups.",
        ge=0,
    )
    keep_last: int = setting(
        0,
        "Layers at the end whose activations are kept although the rest is inverted or checkpointed. The backward pass begins "
        "with them, so each costs the memory of one stored layer and saves its second run.",
        ge=0,
    )
    segments: Optional[List[SegmentConfig]] = setting(
        None,
        "Parts of the stack with an engine each, in order, whose layers add up to model.depth; in place of `engine`, "
        "`checkpoint_every` and `keep_last`.",
    )
