"""The mask of a masked LM: the row behind the tokenizer's pieces here, whichever token is called so in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import torch

from ipu_lean.data import Tokenizer
from ipu_lean.models.convert.folder import Tensors, read_json

ROWS = ("embedding.token.weight", "readout.weight", "readout.bias")
"""Tensors of ours with a row for each token."""


def name_for(tokenizer: Tokenizer) -> str:
    """What to call the mask of a folder that is written: a name that the tokenizer has not, so that its id is the next one."""
    return "[MASK]" if tokenizer.id_of("[MASK]") is None else f"[MASK-{tokenizer.vocab}]"


def mask_of(place: Path, tokenizer: Tokenizer) -> Optional[int]:
    """The id of the token that a folder of transformers calls the mask; None if it names none."""
    names = ("tokenizer_config", "special_tokens_map", "added_tokens", "tokenizer")
    files = {name: read_json(place / f"{name}.json") for name in names if (place / f"{name}.json").is_file()}
    settings = files.get("tokenizer_config", {})
    named = settings.get("mask_token") or files.get("special_tokens_map", {}).get("mask_token")
    name = named.get("content") if isinstance(named, dict) else named
    if not isinstance(name, str):
        return None
    ids: Dict[str, Any] = {one["content"]: one["id"] for one in files.get("tokenizer", {}).get("added_tokens") or ()}
    ids.update({one["content"]: number for number, one in (settings.get("added_tokens_decoder") or {}).items()})
    ids.update(files.get("added_tokens", {}))
    found = ids.get(name, tokenizer.id_of(name))
    return tokenizer.vocab if found is None else int(found)  # a token without an id gets the next one when it is loaded


def with_mask(ours: Tensors, pieces: int, mask: Optional[int]) -> Tuple[Tensors, Optional[str]]:
    """The tensors with the mask's row behind those of the tokenizer's `pieces`, and what that took, in words.

    Args:
        mask: the checkpoint's row for its mask, see `mask_of`. Where there is none the row is the mean of the others, as in
            transformers' `resize_token_embeddings`, but for the noise.
    """
    rows = len(ours[ROWS[0]])
    known = mask is not None and mask < rows
    if rows > pieces and (not known or mask == pieces):
        return ours, None if known else f"the folder names no mask: row {pieces}, behind the tokenizer's pieces, is taken for it"
    found = dict(ours)
    for name in ROWS:
        row = ours[name][mask] if known else ours[name].mean(0)
        found[name] = torch.cat([ours[name][:pieces], row[None], ours[name][pieces + 1 :]])
    if known:
        return found, f"the mask is row {pieces} here, behind the tokenizer's pieces: the checkpoint's, {mask}, was copied there"
    return found, f"the checkpoint has no row for a mask: row {pieces} was added, the mean of the others, and wants training"
