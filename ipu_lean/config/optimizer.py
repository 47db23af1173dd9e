"""`optimizer:` the update rule. Under muP these are the base model's values; each tensor's own follow from its role."""

from typing import Any, Literal, Tuple

from pydantic import field_validator

from ipu_lean.config.section import Section, setting


class OptimizerConfig(Section):
    """Learning rate, moments and decay, as they hold at the base width."""

    kind: Literal["adamw", "adam", "sgd"] = setting(
        "adamw", "`adamw` decays weights apart from the gradient; `adam` and `sgd` add it in."
    )
    lr: float = setting(3e-3, "Peak learning rate at the base width.", gt=0)
    betas: Tuple[float, float] = setting((0.9, 0.95), "Decay of Adam's first and second moments; Adam only.")
    eps: float = setting(1e-8, "Added to the root of Adam's second moment; Adam only. Shrinks with width under muP.", ge=0)
    weight_decay: float = setting(0.1, "Decay of matrices (and of vectors, if `decay_vectors`).", ge=0)
    momentum: float = setting(0.0, "Momentum; SGD only.", ge=0, lt=1)
    nesterov: bool = setting(False, "Nesterov's form of the momentum; SGD only.")
    summation: Literal["kahan", "split", "stochastic", "none"] = setting(
        "kahan",
        "What keeps the bits of an update that a bf16 weight cannot hold; `precision: bf16-pure` only. `kahan`: a bf16 "
        "compensation beside each weight (10 bytes a parameter in all). `split`: the lower half of an fp32 weight (10). "
        "`stochastic`: nothing, but weights are rounded by chance (8). `none`: nothing, and small updates are lost (8).",
    )
    variance: Literal["auto", "bf16", "fp32", "stochastic"] = setting(
        "auto",
        "Type of Adam's second moment; `precision: bf16-pure` only. `auto`: bf16 for a decay of at most 0.996, else fp32 "
        "(2 bytes a parameter more), since a bf16 average rounded to nearest cannot fall beyond that. `stochastic`: bf16, "
        "rounded by chance.",
    )
    decay_vectors: bool = setting(False, "Decay biases and norm gains as well.")

    @field_validator("betas", mode="before")
    @classmethod
    def _pair(cls, value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise ValueError("these are two numbers, such as [0.9, 0.95]")
        return tuple(value)

    @field_validator("betas")
    @classmethod
    def _below_one(cls, value: Tuple[float, float]) -> Tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both must be at least 0 and less than 1")
        return value
