"""PopTorch's own error classes (poptorch/source/poptorch.cpp:624-752) and the one that its Python layer raises."""
from __future__ import annotations

PYTHON_LAYER = "poptorch_py_error"
COMPILER = "poptorch_cpp_error"


class Error(Exception):
    """Anything PopTorch refuses.

    Attributes:
        message: the text without its prefix.
        type: where it was raised: "poptorch_py_error" (Python layer) or "poptorch_cpp_error" (compiler).
        location: file and line of the user's code at fault, or "" when there is none.
    """

    def __init__(self, message: str, type: str = COMPILER, location: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.type = type
        self.location = location


class RecoverableError(Error):
    """The system can go on after `recovery_action`: IPU_RESET, LINK_RESET, PARTITION_RESET or FULL_RESET."""

    def __init__(self, message: str, type: str = COMPILER, location: str = "", recovery_action: str = "IPU_RESET") -> None:
        super().__init__(message, type, location)
        self.recovery_action = recovery_action


class UnrecoverableError(Error):
    """The hardware needs an operator."""


def createPoptorchError(msg: str) -> Error:
    """The error PopTorch's Python layer raises with this text."""
    return Error(msg, PYTHON_LAYER)
