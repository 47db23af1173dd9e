"""Times of the last call (python/_poplar_executor.py:1323-1480). The emulator's are those of the host, in seconds."""
from __future__ import annotations

from typing import Dict, List, Tuple

Triple = Tuple[float, float, float]


class Latencies:
    """Needs `self._times`: one entry (inputs requested, inputs there, outputs there, outputs returned) for each call kept."""

    _times: List[Tuple[float, float, float, float]]

    def getPerfCounters(self) -> Dict[str, List[List[float]]]:
        """`{"input" | "input_complete" | "output" | "output_complete": [[seconds]]}`; the zero point is arbitrary."""
        names = ("input", "input_complete", "output", "output_complete")
        return {name: [[entry[index] for entry in self._times]] for index, name in enumerate(names)}

    def _between(self, start: int, end: int) -> Triple:
        spans = [entry[end] - entry[start] for entry in self._times]
        return (min(spans), max(spans), sum(spans) / len(spans)) if spans else (0.0, 0.0, 0.0)

    def getHostIpuLatency(self) -> Triple:
        """(least, most, average) seconds of the transfer to the device."""
        return self._between(0, 1)

    def getComputeLatency(self) -> Triple:
        return self._between(1, 2)

    def getIpuHostLatency(self) -> Triple:
        return self._between(2, 3)

    def getLatency(self) -> Triple:
        """(least, most, average) seconds from the first input to the last output."""
        return self._between(0, 3)
