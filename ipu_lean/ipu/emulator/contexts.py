"""Context managers that only inform the compiler: NameScope, MultiConv, Attribute (python/ops.py:1138-1340)."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Union

import torch

from . import enums


class NameScope:
    """Prefix of the names of the ops inside. Nothing is computed differently."""

    def __init__(self, name: str) -> None:
        assert isinstance(name, str), "Parameter to NameScope must be a string"
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        return None


class Attribute:
    """Attributes added to the nodes made inside."""

    _current_attrs: Dict[str, Any] = {}

    def __init__(self, **kwargs: Any) -> None:
        self._attributes = kwargs

    def __enter__(self) -> None:
        Attribute._current_attrs = dict(Attribute._current_attrs, **self._attributes)

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        kept = {key: value for key, value in Attribute._current_attrs.items() if key not in self._attributes}
        Attribute._current_attrs = kept


class MultiConv:
    """Convolutions inside are planned together. Nothing is computed differently."""

    def __init__(self) -> None:
        self._settings: Dict[str, Any] = {}

    def availableMemoryProportions(self, value: Union[float, List[float]]) -> MultiConv:
        return self._keep("available_memory_proportions", value, float)

    def partialsTypes(self, value: Union[torch.dtype, List[torch.dtype]]) -> MultiConv:
        """torch.float or torch.half, one or one for each convolution; ValueError otherwise."""
        types = value if isinstance(value, (list, tuple)) else [value]
        if any(item not in (torch.float32, torch.float16) for item in types):
            raise ValueError(f"partialsTypes takes torch.float or torch.half, got {value}")
        self._settings["partials_types"] = list(types)
        return self

    def enableConvDithering(self, value: Optional[Union[bool, List[bool]]]) -> MultiConv:
        flags = value if isinstance(value, (list, tuple)) else [value]
        if value is not None and not all(isinstance(item, bool) for item in flags):
            raise ValueError(f"enableConvDithering takes a bool or a list of bools, got {value}")
        self._settings["enable_conv_dithering"] = value
        return self

    def planType(self, value: Optional[enums.MultiConvPlanType]) -> MultiConv:
        assert value is None or isinstance(value, enums.MultiConvPlanType), "Invalid plan type!"
        self._settings["plan_type"] = value
        return self

    def perConvReservedTiles(self, value: int) -> MultiConv:
        assert isinstance(value, int), "perConvReservedTiles takes an int"
        self._settings["per_conv_reserved_tiles"] = value
        return self

    def cycleBackOff(self, value: float) -> MultiConv:
        assert isinstance(value, float), "cycleBackOff takes a float"
        self._settings["cycle_back_off"] = value
        return self

    def _keep(self, key: str, value: Any, kind: type) -> MultiConv:
        items: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        assert value is None or (len(items) > 0 and all(isinstance(item, kind) for item in items)), f"Invalid {key}"
        self._settings[key] = value
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        return None
