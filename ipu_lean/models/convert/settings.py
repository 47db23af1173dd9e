"""config.json of another library, read key by key: what is asked for is used, what is refused is named, the rest is told."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Tuple

from ipu_lean.errors import ConfigError


class Settings:
    """A config.json.

    Attributes:
        remarks: what could not be carried over as it was, in words, for whoever converts.
    """

    def __init__(self, found: Dict[str, Any]) -> None:
        self.found = found
        self.remarks: List[str] = []

    def take(self, name: str, default: Any) -> Any:
        """The value of `name`; `default` (transformers') where it is not written."""
        return self.found.get(name, default)

    def one_of(self, name: str, known: Mapping[str, str], default: Any) -> str:
        """The value of `name` (or of its only entry, for a list) in our word. ConfigError if there is none for it."""
        value = self.take(name, default)
        if isinstance(value, (list, tuple)):
            value = value[0] if len(value) == 1 else value
        if not isinstance(value, str) or value not in known:
            only(name, value, tuple(known))
        return known[value]

    def remark(self, text: str) -> None:
        """Note something for whoever converts."""
        self.remarks.append(text)


def only(name: str, value: Any, allowed: Tuple[Any, ...], why: str = "") -> None:
    """ConfigError unless `value` of the checkpoint's setting `name` is one of `allowed`."""
    if value not in allowed:
        words = f"; what can be read is {' or '.join(str(one) for one in allowed)}" if allowed else ""
        reason = f" ({why})" if why else ""
        raise ConfigError(f"the checkpoint's `{name}` is {value!r}, which has no counterpart here{reason}{words}", key="SOURCE")
