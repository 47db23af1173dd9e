"""The sections of `model:` that a Reformer adds (Kitaev et al. 2020): hashed and local attention, axial positions."""

from typing import List, Optional, Union

from pydantic import field_validator

from ipu_lean.config.section import Section, setting


class LSHConfig(Section):
    """Attention among tokens whose shared query and key hash alike (`model.attention: lsh`, or a list that names it)."""

    chunk: int = setting(
        64, "Tokens in a chunk of the sorted sequence. A sequence of at most one chunk gets full attention.", ge=1
    )
    before: int = setting(1, "Chunks before its own that a token sees.", ge=0)
    after: int = setting(0, "Chunks after its own that a token sees.", ge=0)
    hashes: int = setting(
        1, "Rounds of hashing. More find more of the neighbours and cost as much more; they may be raised for evaluation.", ge=1
    )
    buckets: Union[None, int, List[int]] = setting(
        None,
        "Buckets in a round, an even number, or two even factors `[a, b]` of it. Unset: about two for each chunk of the sequence "
        "at hand, so that it follows the length; in two factors where there are many.",
    )
    redraw_every: int = setting(
        1, "Updates between two draws of the random directions that hash. 0: drawn once, before the first.", ge=0
    )
    full_below: Optional[int] = setting(
        None,
        "Sequences of up to this many tokens get full attention, with the same weights: hashing begins to pay at some thousand "
        "tokens. Unset: one chunk.",
        ge=1,
    )

    @field_validator("buckets")
    @classmethod
    def _even(cls, value: Union[None, int, List[int]]) -> Union[None, int, List[int]]:
        factors = value if isinstance(value, list) else [] if value is None else [value]
        if isinstance(value, list) and len(value) != 2:
            raise ValueError("this is a number of buckets, or a list of two factors of it")
        if any(factor < 2 or factor % 2 for factor in factors):
            raise ValueError("a direction and its opposite are two buckets, so these are even numbers")
        return value


class LocalConfig(Section):
    """Attention among near tokens (`model.attention: local`, or a list that names it)."""

    chunk: int = setting(64, "Tokens in a chunk. A sequence of at most one chunk gets full attention.", ge=1)
    before: int = setting(1, "Chunks before its own that a token sees.", ge=0)
    after: int = setting(0, "Chunks after its own that a token sees; they serve models that are not `causal`.", ge=0)


class AxialConfig(Section):
    """Learned positions as two tables, one for rows and one for columns of a grid of positions (`model.positions: axial`)."""

    shape: Optional[List[int]] = setting(
        None,
        "Rows and columns `[a, b]`: position t stands in row t // b and column t % b. Their product is at least `model.seq`; any "
        "shorter sequence uses the first rows. Unset: the squarest grid that holds model.seq.",
    )
    dims: Optional[List[int]] = setting(
        None,
        "Features of the row's and of the column's vector, which stand side by side and add up to `model.width`; at other widths "
        "they are split in the same proportion. Unset: a quarter and the rest.",
    )

    @field_validator("shape", "dims")
    @classmethod
    def _two(cls, value: Optional[List[int]]) -> Optional[List[int]]:
        if value is not None and (len(value) != 2 or min(value) < 1):
            raise ValueError("this is a list of two positive numbers")
        return value
