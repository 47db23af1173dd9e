"""What the options of AnyPrecisionAdamW mean for a weight of some type, and which of them contradict each other."""
from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch

from ipu_lean import _compat
from ipu_lean.errors import ConfigError
from ipu_lean.optim.any_precision_rules import STATES_OF, SUMMATIONS

VARIANCES = ("auto", "bf16", "fp32", "stochastic")
KEYS = (
    "use_kahan_summation",
    "momentum_dtype",
    "variance_dtype",
    "compensation_buffer_dtype",
    "summation",
    "variance",
    "maximize",
    "seed",
    "numerics",
)
"""What a group has besides lr, betas, eps and weight_decay."""
KINDS = ("momentum_dtype", "variance_dtype", "compensation_buffer_dtype")
NUMERICS = ("correct", "published")
BETA_LIMIT = 0.996
"""Beyond this decay, rounding to nearest brings b x back to x in bf16 for some x (from 0.9981 for all), so nothing decays."""
HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32, torch.float64)
NAME = "AnyPrecisionAdamW"


def check(group: Dict[str, Any]) -> None:
    """Raises ConfigError for the first option of a group that cannot be honoured."""
    _numbers(group)
    _choices(group)
    for parameter in group["params"]:
        if parameter.dtype not in FLOATS:
            raise ConfigError(f"{NAME} takes real floating-point parameters, this one is {parameter.dtype}")
    for key in KINDS:
        if group[key] is None and key == "variance_dtype":
            continue
        if kind_of(group, key) not in FLOATS:
            raise ConfigError(f"{key} is a floating-point type, such as torch.bfloat16", key=key, value=group[key])
        # By name: files that hold a torch.dtype cannot be loaded with weights_only before torch 2.1.
        group[key] = str(kind_of(group, key)).replace("torch.", "")
    if group["numerics"] == "published":
        for key, value in (("summation", "auto"), ("variance", "auto")):
            if group[key] != value:
                raise ConfigError(
                    "torchdistx has no such choice, and `published` reproduces it",
                    key=key,
                    value=group[key],
                    suggestion="use the types and use_kahan_summation, or numerics='correct'",
                )
        kinds = {variance_kind(group), *(kind_of(group, key) for key in KINDS if key != "variance_dtype")}
        if len(kinds.union(p.dtype for p in group["params"])) > 1 and not _compat.mixes_types():
            raise ConfigError(
                f"torch {torch.__version__} cannot mix types in torchdistx's operations",
                key="numerics",
                value="published",
                suggestion="give weights, momentum_dtype, variance_dtype and compensation_buffer_dtype one type",
            )
        return
    _correct(group)


def _numbers(group: Dict[str, Any]) -> None:
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError("both must be at least 0 and less than 1", key="betas", value=tuple(betas))
    for key in ("lr", "eps", "weight_decay"):
        if torch.is_tensor(group[key]) and (key != "lr" or group[key].numel() != 1):
            raise ConfigError("must be a number" if key != "lr" else "a tensor here has one element", key=key)
        if not float(group[key]) >= 0:
            raise ConfigError("must be a number, 0 or more", key=key, value=group[key])


def _choices(group: Dict[str, Any]) -> None:
    for key, known in (("summation", ("auto", *SUMMATIONS)), ("variance", VARIANCES), ("numerics", NUMERICS)):
        if group[key] not in known:
            raise ConfigError(f"must be one of {', '.join(known)}", key=key, value=group[key])
    kahan, summation = group["use_kahan_summation"], group["summation"]
    if kahan is not None and summation != "auto" and kahan != (summation == "kahan"):
        raise ConfigError(f"contradicts use_kahan_summation={kahan}", key="summation", value=summation, suggestion="give one")


def _correct(group: Dict[str, Any]) -> None:
    """What only the corrected rule refuses."""
    for parameter in group["params"]:
        if parameter.dtype == torch.float16 and group["summation"] in ("split", "stochastic"):
            raise ConfigError(
                "is for bf16 weights, and this one has fp16", key="summation", value=group["summation"], suggestion="use kahan"
            )
    given, variance = kind_of(group, "variance_dtype"), group["variance"]
    if variance != "auto" and given is not None and given != variance_kind(group):
        raise ConfigError(f"contradicts variance_dtype={given}", key="variance", value=variance, suggestion="give one")
    kind = variance_kind(group)
    if kind == torch.float16:
        raise ConfigError(
            "squares of gradients below 2.4e-4 vanish in fp16", key="variance_dtype", value=kind, suggestion="use bf16 or fp32"
        )
    ways = {
        0: ("momentum_dtype", kind_of(group, "momentum_dtype"), "use torch.float32"),
        1: ("variance_dtype", kind, "use variance='auto' (fp32 here) or 'stochastic'"),
    }
    for place, (key, dtype, way) in ways.items():
        beta = group["betas"][place]
        if dtype == torch.bfloat16 and beta > BETA_LIMIT and not (place == 1 and variance == "stochastic"):
            raise ConfigError(
                f"a bf16 average cannot decay by {beta:g} a step: rounding to nearest brings it back, so it would never fall "
                f"({BETA_LIMIT} and less can)",
                key=key,
                value=dtype,
                suggestion=way,
            )


def kind_of(group: Dict[str, Any], key: str) -> Optional[torch.dtype]:
    """A type that a group holds by name, or as the caller gave it."""
    value = group[key]
    return getattr(torch, value, None) if isinstance(value, str) else value


def variance_kind(group: Dict[str, Any]) -> torch.dtype:
    """The type of exp_avg_sq."""
    named = {"bf16": torch.bfloat16, "fp32": torch.float32, "stochastic": torch.bfloat16}.get(group["variance"])
    given = named or kind_of(group, "variance_dtype")
    if given is not None:
        return given
    return torch.bfloat16 if group["numerics"] == "published" or group["betas"][1] <= BETA_LIMIT else torch.float32


def summation_of(group: Dict[str, Any], dtype: torch.dtype) -> str:
    """How a weight of type `dtype` is kept."""
    summation, kahan = group["summation"], group["use_kahan_summation"]
    if summation == "auto":
        wanted = (dtype in HALF and group["numerics"] == "correct") if kahan is None else kahan
        return "kahan" if wanted else "none"
    return "none" if summation in ("split", "stochastic") and dtype not in HALF else summation


def state_kinds(group: Dict[str, Any], dtype: torch.dtype) -> Dict[str, torch.dtype]:
    """{state key: type} for a weight of type `dtype`."""
    kinds = {"exp_avg": kind_of(group, "momentum_dtype"), "exp_avg_sq": variance_kind(group)}
    for kept in STATES_OF.get(summation_of(group, dtype), ()):
        kinds[kept] = kind_of(group, "compensation_buffer_dtype") if kept == "compensation" else torch.uint8
    return kinds


def check_gradients(groups: List[Dict[str, Any]]) -> None:
    """Raises ConfigError for a gradient that is not dense."""
    for group in groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and gradient.layout is not torch.strided:
                raise ConfigError(
                    f"{NAME} takes dense gradients only, and one of shape {tuple(parameter.shape)} is sparse",
                    suggestion="build the embedding with sparse=False",
                )
