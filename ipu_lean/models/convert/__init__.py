"""Models of Hugging Face's transformers read into ours and written back, without that library: Reformer and GPT-2."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch

from ipu_lean.config import Config
from ipu_lean.errors import ConfigError
from ipu_lean.models.convert import folder, gpt2, reformer
from ipu_lean.models.convert.folding import folded
from ipu_lean.models.convert.mask import mask_of, with_mask
from ipu_lean.models.convert.parts import Tensors, read_parts, write_parts
from ipu_lean.models.convert.settings import Settings
from ipu_lean.models.gpt import GPT

__all__ = ["Read", "folder", "mask_of", "read_settings", "read_weights", "with_mask", "written"]
FAMILIES = {"reformer": reformer, "gpt2": gpt2}


class Read(NamedTuple):
    """A config.json as ours: the family's name, the `model` section, and what could not be carried over as it was."""

    family: str
    section: Dict[str, Any]
    remarks: List[str]


def read_settings(found: Dict[str, Any]) -> Read:
    """A config.json. ConfigError for a family or a setting that has no counterpart here, by its name."""
    family = found.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"config.json says model_type {family!r}; what can be read is {' and '.join(FAMILIES)}", key="SOURCE"
        )
    settings = Settings(found)
    section = FAMILIES[family].model_section(settings)
    return Read(family, section, settings.remarks)


def read_weights(family: str, model: GPT, theirs: Tensors) -> Tensors:
    """Our state dict for `model`, which was built from the family's section, from a checkpoint's tensors."""
    if family == "gpt2":
        theirs = _gpt2_names(theirs, model.spec.tied)
    else:
        theirs = _reformer_names(theirs)
    parts = FAMILIES[family].parts_of(model.spec)
    wanted = model.state_dict()
    shapes = {name: tensor.shape for name, tensor in wanted.items() if isinstance(tensor, torch.Tensor)}
    ours = read_parts(parts, theirs, shapes, FAMILIES[family].CONSTANTS)
    ours = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in ours.items()}
    rest = {name: tensor for name, tensor in wanted.items() if name not in ours}
    assert all("_extra_state" in name for name in rest), f"parameters without a counterpart: {sorted(rest)[:3]}"
    return {**ours, **rest}


def _reformer_names(theirs: Tensors) -> Tensors:
    """Older checkpoints tie lm_head.bias, which newer ones keep beside the decoder's and never read."""
    found = dict(theirs)
    spare = found.pop("lm_head.bias", None)
    if spare is not None:
        found.setdefault("lm_head.decoder.bias", spare)
    return found


def _gpt2_names(theirs: Tensors, tied: bool) -> Tensors:
    """The bare model's names carry no prefix; causal masks and the copy of a tied embedding go."""
    bare = not any(name.startswith("transformer.") for name in theirs)
    found = {f"transformer.{name}" if bare and not name.startswith("lm_head.") else name: one for name, one in theirs.items()}
    found = {name: tensor for name, tensor in found.items() if not name.endswith(".attn.bias")}
    if tied:
        found.pop("lm_head.weight", None)
    return found


def written(config: Config, model: GPT, tensors: Tensors, end: Optional[int]) -> Tuple[Dict[str, Any], Tensors, List[str]]:
    """(config.json, tensors by transformers' names, names of ours that multipliers were folded into).

    Args:
        tensors: the weights of `model`, which was built from `config`.
        end: the tokenizer's end-of-text id, if it has one.
    Raises:
        ConfigError: what the family has not, by its key.
    """
    spec = model.spec
    family = gpt2 if config.model.stack.kind == "residual" else reformer
    settings = family.settings_of(config, spec, end)
    ours, changed = folded(model, tensors)
    if "readout.weight" in ours and spec.tied:
        settings["tie_word_embeddings"] = False
        parts = [*family.parts_of(spec), gpt2.UNTIED]
    else:
        parts = family.parts_of(spec)
    if family is reformer and spec.head != "classifier":
        ours.setdefault("readout.bias", torch.zeros(spec.vocab))
    theirs = write_parts(parts, ours)
    if "lm_head.decoder.bias" in theirs:
        theirs["lm_head.bias"] = theirs["lm_head.decoder.bias"]
    return settings, theirs, changed
