"""Two devices, one run: record a trace on each, compare them number by number, say where they part first."""

from __future__ import annotations

from ipu_lean.parity.compare import TOLERANCES, Comparison, Row, Tolerances, compare
from ipu_lean.parity.record import for_device, record
from ipu_lean.parity.report import format_table, write_report
from ipu_lean.parity.start import make_start
from ipu_lean.parity.trace import Start, Trace, load_trace

__all__ = [
    "TOLERANCES", "Comparison", "Row", "Start", "Tolerances", "Trace", "compare", "for_device", "format_table", "load_trace",
    "make_start", "record", "write_report",
]
