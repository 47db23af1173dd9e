"""`memory:` how activations are saved between forward and backward. Never changes the numbers beyond rounding."""

from typing import Literal, Optional

from ipu_lean.config.section import Section, setting


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
    loss_chunk: Optional[int] = setting(
        None,
        "Tokens whose logits are alive at once in the loss. Unset: chosen from the vocabulary. 0: all of them, never chunked.",
        ge=0,
    )
    ipu_backward: Literal["recompute", "surrogate"] = setting(
        "recompute",
        "How a stack saves memory on IPUs. `recompute`: PopART keeps what enters each layer and computes the rest again. "
        "`surrogate`: nothing is kept; the step walks a reversible stack backwards itself and hands PopTorch the gradients (one "
        "IPU, or `ipu.execution: sharded`; replicas as usual). Other devices do not read it.",
    )
