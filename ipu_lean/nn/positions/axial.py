"""Axial positions: a grid of positions, and one learned vector for each of its rows and columns (Kitaev et al. 2020).

Position t stands in row t // columns and column t % columns; its vector is that of the row beside that of the column. A grid of
512 x 1024 thereby holds half a million positions in 1536 vectors.
"""

from __future__ import annotations

from typing import Dict, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ipu_lean.errors import ConfigError


class AxialPositions(nn.Module):
    """Vectors `[length, width]` for the positions start .. start + length - 1. For muP both tables are embeddings.

    Args:
        shape: (rows, columns) of the grid. Any sequence that it holds will do, in training too: it uses the first rows.
        dims: features of the row's and of the column's vector; the width is their sum.
        std: standard deviation of the tables at initialisation.
        dropout: in training, share of the columns whose positions get no vector at all, drawn for each sequence (the published
            form: a position is dropped as a whole, and with it all others that share its column).
    """

    def __init__(self, shape: Sequence[int], dims: Sequence[int], std: float = 0.1, dropout: float = 0.0) -> None:
        super().__init__()
        for key, pair in (("model.axial.shape", shape), ("model.axial.dims", dims)):
            if len(pair) != 2 or min(pair) < 1:
                raise ConfigError("this is a list of two positive numbers", key=key, value=list(pair))
        self.shape, self.dims, self.std, self.dropout = tuple(shape), tuple(dims), std, dropout
        self.rows = nn.Parameter(torch.empty(shape[0], 1, dims[0]))
        self.columns = nn.Parameter(torch.empty(1, shape[1], dims[1]))
        self.reset_parameters()

    @property
    def init_stds(self) -> Dict[str, float]:
        """Standard deviation of each parameter at initialisation, by name."""
        return {"rows": self.std, "columns": self.std}

    def reset_parameters(self) -> None:
        """Draw both tables anew."""
        with torch.no_grad():
            self.rows.normal_(0.0, self.std)
            self.columns.normal_(0.0, self.std)

    def forward(self, like: torch.Tensor, start: int = 0) -> torch.Tensor:
        """`[length, width]` for `like` of shape `[batch, length, width]`; `[batch, length, width]` where it drops.

        Raises ConfigError for a position beyond the grid.
        """
        rows, columns = self.shape
        stop = start + like.shape[1]
        if stop > rows * columns:
            raise ConfigError(
                f"position {stop - 1} lies beyond the grid's {rows * columns} positions",
                key="model.axial.shape",
                value=list(self.shape),
                suggestion=f"use [{-(-stop // columns)}, {columns}]",
            )
        first, last = start // columns, -(-stop // columns)  # the rows that are touched
        grid = torch.cat(
            [
                self.rows[first:last].expand(last - first, columns, self.dims[0]),
                self.columns.expand(last - first, columns, self.dims[1]),
            ],
            -1,
        )
        offset = start - first * columns
        if not (self.training and self.dropout):
            return grid.view(-1, grid.shape[-1])[offset : offset + like.shape[1]]
        keep = F.dropout(grid.new_ones(like.shape[0], 1, columns, 1), self.dropout, True)
        return (grid * keep).flatten(1, 2)[:, offset : offset + like.shape[1]]

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"shape={self.shape}, dims={self.dims}, dropout={self.dropout}"
