"""Lists of numbers as people write them: `32,64,128`, `2^-10..2^-4`, `1e-3..1e-1/9`."""

from __future__ import annotations

import math
import re
from typing import Any, List

_NUMBER = r"[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?"
_POWER = re.compile(rf"^({_NUMBER})(?:\^|\*\*)([-+]?{_NUMBER})$")
_PLAIN = re.compile(rf"^{_NUMBER}$")
_MOST = 1000


def numbers(text: str) -> List[float]:
    """The positive numbers that `text` names, ascending, each once.

    Items are separated by commas. `A..B` doubles from A up to B, `A..B*F` multiplies by F instead, and `A..B/N` gives N numbers
    evenly spaced on a logarithmic scale, both ends included. A number may be a power: `2^-7`, `10^-3`.

    Raises:
        ValueError: with one sentence that says what is wrong.
    """
    found: List[float] = []
    for item in text.strip().strip("[]").split(","):
        if item.strip():
            found += _item(item.strip())
    if not found:
        raise ValueError("this names no number")
    return sorted(set(found))


def whole(values: List[Any]) -> List[Any]:
    """The same with whole floats as integers; others stay, for the schema to refuse."""
    return [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]


def _item(item: str) -> List[float]:
    if ".." not in item:
        return [_number(item)]
    low_text, _, rest = item.partition("..")
    parts = re.fullmatch(r"(.+?)(?:(?<!\*)\*(?!\*)(.+)|/([0-9]+))?", rest)
    assert parts is not None or not rest
    if parts is None:
        raise ValueError(f"the range {item!r} has no end")
    low, high = _number(low_text), _number(parts.group(1))
    if not 0 < low <= high:
        raise ValueError(f"the range {item!r} must rise from a number above 0")
    if parts.group(3) is not None:
        count = int(parts.group(3))
        if not 2 <= count <= _MOST:
            raise ValueError(f"the range {item!r} needs 2 to {_MOST} numbers")
        return [_tidy(low * (high / low) ** (index / (count - 1))) for index in range(count)]
    factor = 2.0 if parts.group(2) is None else _number(parts.group(2))
    if factor <= 1 or math.log(high / low) / math.log(factor) > _MOST:
        raise ValueError(f"the range {item!r} needs a factor above 1, and at most {_MOST} steps")
    found, value = [], low
    while value <= high * (1 + 1e-9):
        found.append(_tidy(value))
        value *= factor
    return found


def _number(text: str) -> float:
    text = text.strip()
    power = _POWER.match(text)
    if power is not None:
        try:
            return float(power.group(1)) ** float(power.group(2))
        except (OverflowError, ZeroDivisionError):
            pass
    elif _PLAIN.match(text):
        return float(text)
    raise ValueError(f"{text!r} is not a positive number; write for example 64, 3e-3 or 2^-7")


def _tidy(value: float) -> float:
    """Without the last digits, which only say in what order it was multiplied."""
    return float(f"{value:.12g}")


def counted(value: Any) -> Any:
    """A number N of seeds as the seeds 0 to N-1; anything else as it is.

    Raises:
        ValueError: N is below 1.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ValueError("this is a list of seeds, or how many there are: at least 1")
        return list(range(value))
    return value
