"""How a command that ends in a verdict tells it, and what every command says on the way."""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict

from ipu_lean.errors import VerdictFailed

Summary = Dict[str, Any]


def print_verdict(run: Callable[[], Summary]) -> Summary:
    """Print the table, and the reason of a verdict that is no pass; the summary carries the exit code.

    Args:
        run: returns a summary with `table` and `verdict`, and the reason in `reason` or in the metrics' `diagnosis`; or raises
            VerdictFailed with such a summary.
    """
    try:
        summary = run()
    except VerdictFailed as failure:
        assert failure.summary is not None
        summary = {**failure.summary, "error": " ".join(str(failure).split())}
    print(summary.pop("table"))
    sys.stdout.flush()
    reason = summary.pop("reason", None)
    if "error" in summary:
        print(f"ipu-lean: error: {summary['error']}", file=sys.stderr)
    elif summary["verdict"] == "inconclusive":
        print(f"ipu-lean: warning: inconclusive: {reason or summary['metrics']['diagnosis']}", file=sys.stderr)
    return summary


def say(text: str) -> None:
    """One line for the person who watches, beside the results."""
    print(text, file=sys.stderr, flush=True)
