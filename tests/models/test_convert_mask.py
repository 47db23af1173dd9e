"""Which row of a checkpoint is its mask, and how that becomes the row behind the tokenizer's pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Optional

import pytest
import torch

from ipu_lean.data import Tokenizer
from ipu_lean.errors import ConfigError
from ipu_lean.models.convert import mask_of, with_mask

pytestmark = pytest.mark.pod


class Pieces(Tokenizer):
    """Five pieces, one of which could be a mask."""

    vocab = 5

    def id_of(self, piece: str) -> Optional[int]:
        return {"<mask>": 3}.get(piece)


FILES: Dict[str, Any] = {
    "none named": ({"tokenizer_config": {"eos_token": "</s>"}}, None),
    "no files": ({}, None),
    "a piece": ({"tokenizer_config": {"mask_token": "<mask>"}}, 3),
    "a piece, in an older file": ({"special_tokens_map": {"mask_token": {"content": "<mask>", "lstrip": True}}}, 3),
    "added when it is loaded": ({"tokenizer_config": {"mask_token": "[MASK]"}}, 5),
    "added": ({"tokenizer_config": {"mask_token": "[MASK]", "added_tokens_decoder": {"6": {"content": "[MASK]"}}}}, 6),
    "added, in an older file": ({"special_tokens_map": {"mask_token": "[MASK]"}, "added_tokens": {"[MASK]": 7, "x": 6}}, 7),
    "in json": ({"tokenizer_config": {"mask_token": "m"}, "tokenizer": {"added_tokens": [{"id": 8, "content": "m"}]}}, 8),
}


@pytest.mark.parametrize("files, expected", FILES.values(), ids=list(FILES))
def test_the_mask_is_the_token_that_the_folder_calls_so(tmp_path: Path, files: Dict[str, Any], expected: Optional[int]) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert mask_of(tmp_path, Pieces()) == expected


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "added_tokens.json").write_text("[")
    with pytest.raises(ConfigError, match=r"added_tokens\.json is not JSON"):
        mask_of(tmp_path, Pieces())


def tensors(rows: int) -> Dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = {"embedding.token.weight": (rows, 3), "readout.weight": (rows, 6), "readout.bias": (rows,), "norm.weight": (6,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in drawn.items()}


@pytest.mark.parametrize(
    "rows, mask, remark",
    [
        (6, 5, None), (8, None, "names no mask"), (5, 3, "copied"), (8, 3, "copied"), (8, 7, "copied"), (5, None, "added"),
        (5, 5, "added"),
    ],
)  # fmt: skip
def test_the_row_behind_the_pieces_becomes_the_masks(rows: int, mask: Optional[int], remark: Optional[str]) -> None:
    before = tensors(rows)
    after, said = with_mask(before, 5, mask)
    assert said is None if remark is None else remark in str(said)
    for name, old in before.items():
        if name == "norm.weight":
            assert torch.equal(after[name], old)
            continue
        others = [row for row in range(rows) if row != 5]
        assert len(after[name]) == max(rows, 6) and torch.equal(after[name][others], old[others])
        expected = old[mask] if remark == "copied" else old.mean(0) if remark == "added" else old[5]
        assert torch.equal(after[name][5], expected)
