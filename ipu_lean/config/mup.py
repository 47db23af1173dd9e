"""`mup:` how initialisation and learning rates follow the width (Yang et al. 2022, Tensor Programs V) and the depth."""

from typing import Literal, Optional

from pydantic import Field

from ipu_lean.config.model import ModelConfig
from ipu_lean.config.section import Section, setting

BASE = (
    "The base model given as a whole, for when more than the width differs: the path of another YAML, whose `model` section "
    "counts, or such a section written here. A path is read once, when the file is loaded; the resolved configuration holds "
    "the section itself."
)


class MupConfig(Section):
    """The parametrisation. At the base model every multiplier is 1, so muP and the standard one agree there up to zero-inits."""

    parametrization: Literal["mup", "standard"] = setting(
        "mup",
        "`mup`: tune at a small width, train at a large one with the same learning rate. `standard`: all multipliers are 1.",
    )
    base_width: Optional[int] = setting(
        None,
        "Width at which the hyperparameters are meant as written (tuned). muP needs it or `base`; one base for all runs that "
        "are to share their hyperparameters. Not read under `standard`.",
        ge=1,
        le=1 << 20,
    )
    base: Optional[ModelConfig] = Field(None, description=BASE)
    base_depth: int = setting(2, "Depth at which CompleteP's branch multiplier is 1.", ge=1)
    depth_rule: Literal["auto", "completep", "none"] = setting(
        "auto",
        "`completep` multiplies each branch by base_depth / depth (Dey et al. 2025), which also makes reversible stacks far "
        "better conditioned; `none` leaves branches alone. `auto`: completep under mup, none under standard.",
    )
    readout_zero_init: Optional[bool] = setting(None, "The readout starts at zero. Unset: yes under mup, no under standard.")
    query_zero_init: Optional[bool] = setting(
        None,
        "Query projections start at zero, so attention starts uniform; hashed attention's never do, since a zero query has no "
        "direction. Unset: yes under mup, no under standard.",
    )
    init_scale: float = setting(1.0, "Hidden weights start with standard deviation init_scale / sqrt(fan_in).", gt=0)
    embedding_std: float = setting(0.1, "Standard deviation of the embedding at initialisation, at every width.", gt=0)
    output_mult: float = setting(1.0, "Multiplies the logits; a hyperparameter that transfers over width.", gt=0)
    attention_mult: float = setting(1.0, "Multiplies the attention scores; a hyperparameter that transfers over width.", gt=0)
    embedding_mult: float = setting(1.0, "Multiplies the embedded tokens; a hyperparameter that transfers over width.", gt=0)
    decay: Literal["coupled", "independent"] = setting(
        "coupled",
        "AdamW's decay per step is lr x decay. `coupled` keeps that product the same at every width (the decay grows as the "
        "learning rate shrinks); `independent` takes schedule x decay off the weights at each update, whatever lr and width are.",
    )
