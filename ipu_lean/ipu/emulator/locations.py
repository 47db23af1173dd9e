"""Where weights, activations and optimizer state live: on chip or in streaming memory (python/options.py:515-665)."""
from __future__ import annotations

from .optionsdict import OptionsDict


class TensorLocationSettings(OptionsDict):
    """One kind of tensor's location; a setting that was never made is left to PopART."""

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        assert isinstance(min_elements, int), "min_elements must be an int"
        self.createOrSet(minElementsForOffChip=min_elements)
        return self

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        assert isinstance(min_elements, int), "min_elements must be an int"
        self.createOrSet(minElementsForReplicatedTensorSharding=min_elements)
        return self

    def useOnChipStorage(self, use: bool = True) -> TensorLocationSettings:
        """True: on chip; False: streaming memory; None: back to PopART's default."""
        if use is None:
            self.deleteIfExists("onChip")
        else:
            self._flag("onChip", use)
        return self

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        return self._flag("useReplicatedTensorSharding", use)

    def useIOTilesToLoad(self, use: bool = True) -> TensorLocationSettings:
        return self._flag("useIOTilesToLoad", use)

    def useIOTilesToStore(self, use: bool = True) -> TensorLocationSettings:
        return self._flag("useIOTilesToStore", use)

    def _flag(self, key: str, use: bool) -> TensorLocationSettings:
        assert isinstance(use, bool), f"{key} takes a bool, got {use!r}"
        self.createOrSet(**{key: int(use)})
        return self


class _TensorLocationOptions(OptionsDict):
    """`options.TensorLocations`."""

    def numIOTiles(self, num_tiles: int) -> _TensorLocationOptions:
        """Tiles kept for host transfers: an even number from 32 to 192, AssertionError otherwise."""
        assert isinstance(num_tiles, int), "num_tiles must be an int"
        assert 32 <= num_tiles <= 192 and num_tiles % 2 == 0, f"numIOTiles takes an even number from 32 to 192, got {num_tiles}"
        self.createOrSet(numIOTiles=num_tiles)
        return self

    def setActivationLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        return self._location("location_activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        return self._location("location_weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        return self._location("location_optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        return self._location("location_accumulator", location)

    def _location(self, key: str, location: TensorLocationSettings) -> _TensorLocationOptions:
        assert isinstance(location, TensorLocationSettings), f"expected TensorLocationSettings, got {type(location)}"
        self.createOrSet(**{key: location.toDict()})
        return self
