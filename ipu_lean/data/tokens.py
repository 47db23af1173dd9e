"""Token ids on disk: one flat array, read through a memory map."""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Optional, Tuple, Union

import numpy as np

from ipu_lean.errors import RunError

DTYPES = {".u16": np.dtype("<u2"), ".u32": np.dtype("<u4")}
"""The file's suffix says how wide an id is; the byte order is always little-endian."""


def suffix_for(vocab: int) -> str:
    """The narrowest suffix whose type holds the ids 0 .. vocab - 1."""
    return ".u16" if vocab <= 1 << 16 else ".u32"


class TokenFile:
    """The tokens `start` .. `stop` of a file, without reading it into memory.

    Args:
        path: a file that ends in `.u16` or `.u32`.
        start, stop: the part of it that this object stands for, in tokens; everything by default.

    Pickles as its path and bounds, so it may be sent to another process.
    """

    def __init__(self, path: Union[str, Path], start: int = 0, stop: Optional[int] = None) -> None:
        self.path = Path(path)
        self.dtype = DTYPES.get(self.path.suffix)
        assert self.dtype is not None, f"{self.path.name} ends in neither of {', '.join(DTYPES)}"
        try:
            size = os.stat(self.path).st_size
        except OSError as error:
            raise RunError(f"The token file {self.path} cannot be read: {error.strerror}.") from error
        stored = size // self.dtype.itemsize
        stop = stored if stop is None else stop
        if size % self.dtype.itemsize or stop > stored:
            raise RunError(
                f"The token file {self.path} is damaged: {size:,} bytes, where {stop:,} tokens are expected. "
                "Delete its folder and prepare again."
            )
        assert 0 <= start <= stop, f"bounds {start} .. {stop}"
        self.start, self.stop = start, stop
        self._map = np.memmap(self.path, self.dtype, "r", shape=(stored,)) if stored else np.empty(0, self.dtype)

    def __len__(self) -> int:
        return self.stop - self.start

    def __reduce__(self) -> Tuple[Any, ...]:
        return TokenFile, (str(self.path), self.start, self.stop)

    def flat(self) -> np.ndarray:
        """All tokens as they are stored, `[tokens]`: a view of the memory map."""
        return np.asarray(self._map[self.start : self.stop])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens `start` .. `start + count` as int32 `[count]`; IndexError outside the file."""
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens {start} .. {start + count} of {len(self)}")
        return np.asarray(self._map[self.start + start : self.start + start + count]).astype(np.int32)

    def windows(self, indices: np.ndarray, seq: int) -> np.ndarray:
        """Windows of `seq + 1` tokens, window i beginning at token `i * seq`: int32 `[len(indices), seq + 1]`."""
        count = max(0, (len(self) - 1) // seq)
        if len(indices) and not 0 <= int(np.min(indices)) <= int(np.max(indices)) < count:
            raise IndexError(f"windows {np.min(indices)} .. {np.max(indices)} of {count}")
        part = np.asarray(self._map[self.start : self.stop])
        step = part.itemsize
        view = np.lib.stride_tricks.as_strided(part, (count, seq + 1), (seq * step, step), writeable=False)
        return view[indices].astype(np.int32)
