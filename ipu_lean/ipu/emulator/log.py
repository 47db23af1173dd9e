"""PopTorch's logger. Warnings that PopTorch prints are `logging` records of the logger named "poptorch"."""
from __future__ import annotations

import logging
from typing import Union

logger = logging.getLogger("poptorch")
_LEVELS = {"OFF": logging.CRITICAL + 10, "ERR": logging.ERROR, "WARN": logging.WARNING, "INFO": logging.INFO,
           "DEBUG": logging.DEBUG, "TRACE": 5, "TRACE_ALL": 1}
_NUMBERS = {0: "TRACE", 1: "DEBUG", 2: "INFO", 3: "WARN", 4: "ERR", 6: "OFF"}


def setLogLevel(level: Union[int, str]) -> None:
    """How much PopTorch says: OFF, ERR, WARN, INFO, DEBUG, TRACE or TRACE_ALL, or their numbers. ValueError otherwise."""
    name = _NUMBERS.get(level, level) if isinstance(level, int) else level
    if name not in _LEVELS:
        raise ValueError(f"Invalid log level {level}, valid values are {', '.join(_LEVELS)}")
    logger.setLevel(_LEVELS[name])
