"""The rules of `model.stack`."""

from __future__ import annotations

import dataclasses
from typing import Dict, Optional, Tuple

from ipu_lean import conditioning
from ipu_lean.config import derived
from ipu_lean.config.model import ModelConfig, StackConfig
from ipu_lean.config.root import Config
from ipu_lean.errors import ConfigError

# Keys that only a reversible stack reads, with the values that say nothing.
_NOTHING = {
    "coupling": ("additive",),
    "input": ("auto", "duplicate"),
    "output": ("auto", "sum-minus-input"),
    "beta": (None,),
    "index": ("stream",),
    "exact": (False,),
    "exact_bits": (StackConfig().exact_bits,),
}


# (unit roundoff of the streams, of 16-bit branches) in each precision.
_UNITS: Dict[str, Tuple[float, Optional[float]]] = {
    "bf16-mixed": (conditioning.SINGLE, conditioning.BFLOAT16),
    "fp16-mixed": (conditioning.SINGLE, conditioning.FLOAT16),
    "bf16-pure": (conditioning.BFLOAT16, None),
    "fp16-ipu": (conditioning.FLOAT16, None),
}


def check_stack(model: ModelConfig, where: str) -> None:
    """The rules inside `model.stack`; `where` is the model section's path."""
    stack, where = model.stack, f"{where}.stack"
    if stack.order == "aaff" and (model.depth % 2 or model.num_inner_groups > 1 and model.num_inner_groups % 2):
        raise ConfigError(
            "order aaff joins two layers in a block, so depth (and the layers of a group) must be even",
            key=where.replace(".stack", ".depth"),
            value=model.depth,
            suggestion="use an even depth, or order attn-ffn",
        )
    if stack.kind == "residual":
        for name, nothing in _NOTHING.items():
            if getattr(stack, name) not in nothing:
                raise ConfigError(
                    "a residual stack has one stream, so there is nothing to choose",
                    key=f"{where}.{name}",
                    value=getattr(stack, name),
                    suggestion="remove it, or set `kind: reversible`",
                )
        return
    _coupling(stack, where)
    _streams(model, stack, where)


def _coupling(stack: StackConfig, where: str) -> None:
    if stack.beta is not None and derived.beta(stack) is None:
        rule = f"the {stack.coupling} coupling has no beta"
        raise ConfigError(rule, key=f"{where}.beta", value=stack.beta, suggestion="remove it")
    if stack.beta is not None and not 0 < stack.beta < 1:
        raise ConfigError(
            "lies between 0 and 1: with 0 no velocity is left to undo a step with, with 1 nothing is learned",
            key=f"{where}.beta",
            value=stack.beta,
            suggestion="use 0.9, or 0.99 for deep stacks",
        )
    if stack.index != "stream" and stack.coupling != "mean":
        raise ConfigError(f"the {stack.coupling} coupling counts nothing", key=f"{where}.index", value=stack.index)
    if stack.exact and stack.coupling != "additive":
        raise ConfigError(
            f"sums on a grid are exact, products are not, and the {stack.coupling} coupling multiplies",
            key=f"{where}.exact",
            value=True,
            suggestion="use `coupling: additive`, or remove it",
        )
    if not stack.exact and stack.exact_bits != StackConfig().exact_bits:
        raise ConfigError(
            "only exact streams have a grid",
            key=f"{where}.exact_bits",
            value=stack.exact_bits,
            suggestion=f"set `{where}.exact: true`",
        )


def _streams(model: ModelConfig, stack: StackConfig, where: str) -> None:
    begin, end = derived.stack_input(stack), derived.stack_output(stack)
    if begin == "split" and model.width % 2:
        key = where.replace(".stack", ".width")
        raise ConfigError("`stack.input: split` halves the width, so it must be even", key=key, value=model.width)
    if end == "sum-minus-input" and (stack.coupling != "additive" or begin != "duplicate"):
        why = f"{stack.coupling} streams rescale it"
        if stack.coupling == "additive":
            why = f"with input {begin} it is not in the sum twice"
        raise ConfigError(
            f"takes away the input that both additive streams began with, and {why}",
            key=f"{where}.output",
            value=end,
            suggestion="use `auto`, `sum`, `mean`, `x` or `y`",
        )
    hidden = derived.hidden_width(model)
    if derived.tied(model) and hidden != model.width:
        raise ConfigError(
            f"with input {begin} and output {end} {hidden} features leave the stack, and a tied readout is the embedding, which "
            f"has {model.width}",
            key=where.replace(".stack", ".tied"),
            value=True,
            suggestion="set `model.tied: false`, or choose another output",
        )


def conditioned(config: Config) -> conditioning.Stack:
    """What conditioning.py needs to know of the stack.

    The size of a branch's output over the embedding's: after its norm and with our initialisation it is about the branch
    multiplier.
    """
    stack, mup = config.model.stack, config.mup
    return conditioning.Stack(
        coupling=stack.coupling,
        half_steps=2 * derived.inverted_layers(config),
        beta=derived.beta(stack),
        index=stack.index,
        input=derived.stack_input(stack),
        branch=derived.depth_mult(config) / (mup.embedding_std * mup.embedding_mult),
        norm_eps=config.model.norm_eps,
    )


def check_inversion(config: Config) -> None:
    """Refuses a stack whose inversion is predicted to spoil the gradients, with the figure."""
    stack = config.model.stack
    if stack.kind == "residual":
        return
    unit, half = _UNITS.get(config.precision, (conditioning.SINGLE, None))
    if derived.surrogate(config) and unit == conditioning.FLOAT16:
        unit, half = _UNITS["fp16-mixed"]  # the walk back widens the streams (ipu/walk.py)
    if stack.exact and unit != conditioning.SINGLE:
        raise ConfigError(
            f"needs streams of 24 bits, and with precision {config.precision} they have "
            f"{11 if unit == conditioning.FLOAT16 else 8}",
            key="model.stack.exact",
            value=True,
            suggestion="use `fp32` or `bf16-mixed`, or remove it",
        )
    if config.memory.allow_ill_conditioned:
        return
    if stack.input == "zeros-read":
        gain = config.model.norm_eps**-0.5
        raise ConfigError(
            f"the first branch would read zeros: its output is the same for every token, and its norm magnifies what is off "
            f"there by 1 / sqrt(norm_eps) = {gain:.0f}",
            key="model.stack.input",
            value=stack.input,
            suggestion="use `zeros`, or set `memory.allow_ill_conditioned: true`",
        )
    if stack.exact or not derived.inverts(config):
        return
    described = conditioned(config)
    error, limit = conditioning.gradient_error(described, half, unit), conditioning.tolerance(described, half, unit)
    if error > limit:
        raise ConfigError(
            f"undoing {described.half_steps} half-steps of this coupling magnifies rounding up to "
            f"{conditioning.amplification(described):.2g} times; in {config.precision} that puts gradients off by about "
            f"{min(error, 1.0):.1g} of their size, and the limit is {limit:.1g}",
            key="model.stack.coupling",
            value=stack.coupling,
            suggestion=f"{_way_out(config, half, unit)}, or set `memory.allow_ill_conditioned: true`",
        )


def _way_out(config: Config, half: Optional[float], unit: float) -> str:
    """The nearest setting that would do."""
    described = conditioned(config)
    if described.beta is not None:
        for beta in (0.95, 0.98, 0.99, 0.995, 0.999):
            changed = dataclasses.replace(described, beta=beta)
            error, limit = conditioning.gradient_error(changed, half, unit), conditioning.tolerance(changed, half, unit)
            if beta > described.beta and error <= limit:
                return f"use `model.stack.beta: {beta}` or more, or `memory.engine: checkpoint`"
    return "use `coupling: additive`, fewer layers, or `memory.engine: checkpoint`, which inverts nothing"
