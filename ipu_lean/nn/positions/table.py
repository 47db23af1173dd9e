"""Constant tables of positions, held as buffers that survive what buffers usually do not."""

from __future__ import annotations

from typing import Any, Dict, List

import torch
from torch import nn

_HOST_DEVICES = ("cpu", "cuda")


class PositionTable(nn.Module):
    """Named float tables `[seq, features]`, computed in float64 and kept as non-persistent buffers.

    PopTorch refuses plain tensors inside a forward pass, so they are buffers. `to_empty` leaves buffers undefined,
    `load_state_dict(assign=True)` leaves them on `meta`, and `double()` would keep a float32 table's rounding: they are computed
    again whenever the module is converted or moved.
    """

    names: List[str] = []

    def __init__(self, seq: int) -> None:
        super().__init__()
        self.seq = seq

    def _register(self) -> None:
        """Subclasses call this at the end of their constructor. Under `torch.device("meta")` the tables are on `meta` as well."""
        tables = self.tables()
        self.names = list(tables)
        device = torch.empty(0).device
        for name, table in tables.items():
            self.register_buffer(name, table.to(device, torch.get_default_dtype()), persistent=False)

    def tables(self) -> Dict[str, torch.Tensor]:
        """The tables, float64 on CPU."""
        raise NotImplementedError

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> PositionTable:
        super()._apply(fn, *args, **kwargs)
        if getattr(self, self.names[0]).device.type in _HOST_DEVICES:
            with torch.no_grad():
                for name, table in self.tables().items():
                    getattr(self, name).copy_(table)
        return self

    def _ready(self, device: torch.device) -> None:
        """Leave `meta` for `device` if the rest of the model already has."""
        if getattr(self, self.names[0]).is_meta and device.type != "meta":
            for name, table in self.tables().items():
                setattr(self, name, table.to(device, getattr(self, name).dtype))
