"""The base of every options group: a dictionary of declared keys that can be frozen (python/_options_impl.py:43-186)."""
from __future__ import annotations

import copy
from typing import Any, Dict

FROZEN = "Can't modify frozen Options"


class OptionsDict:
    """Declared keys only, each keeps the type of its default; any change after `_freeze` is an AttributeError.

    A key is read as an attribute (`options.device_iterations`) and set by assignment or `set(key=value)`.
    """

    def __init__(self, **default_values: Any) -> None:
        self.__dict__["_is_frozen"] = False
        self.__dict__["_values"] = default_values

    def set(self, **kwargs: Any) -> None:
        """AssertionError on an unknown key or on a value of another type than the default's."""
        self.checkIsFrozen()
        for key, value in kwargs.items():
            assert key in self._values, f"Invalid option {key}, valid options are {sorted(self._values)}"
            expected = type(self._values[key])
            assert isinstance(value, expected), f"Unexpected type {type(value)} for option {key}. Expected {expected}"
            self._values[key] = value

    def createOrSet(self, **kwargs: Any) -> None:
        """As `set`, but a key that was not declared is added."""
        self.checkIsFrozen()
        for key, value in kwargs.items():
            if key in self._values:
                self.set(**{key: value})
            else:
                self._values[key] = value

    def exists(self, option: str) -> bool:
        return option in self._values

    def deleteIfExists(self, option: str) -> None:
        self.checkIsFrozen()
        self._values.pop(option, None)

    def checkIsFrozen(self, option: Any = None) -> None:
        if self.__dict__.get("_is_frozen", False) and option != "_is_frozen":
            raise AttributeError(FROZEN)

    def _set_frozen(self, frozen: bool) -> None:
        self.__dict__["_is_frozen"] = frozen
        for value in self.__dict__.values():
            if isinstance(value, OptionsDict):
                value._set_frozen(frozen)
            elif hasattr(value, "_is_frozen"):
                value.__dict__["_is_frozen"] = frozen

    def _freeze(self) -> None:
        self._set_frozen(True)

    def _unfreeze(self) -> None:
        self._set_frozen(False)

    def __setattr__(self, option: str, value: Any) -> None:
        self.checkIsFrozen(option)
        if option.startswith("_"):
            if option not in self.__dict__:
                raise AttributeError(f"Invalid private attribute {option}")
            self.__dict__[option] = value
        else:
            self.set(**{option: value})

    def __getattr__(self, option: str) -> Any:
        values = self.__dict__.get("_values", {})
        if option not in values:
            raise AttributeError(f"Invalid attribute {option}.")
        return values[option]

    def __deepcopy__(self, memory: Dict[int, Any]) -> OptionsDict:
        twin = type(self).__new__(type(self))
        memory[id(self)] = twin
        for key, value in self.__dict__.items():
            twin.__dict__[key] = False if key == "_is_frozen" else copy.deepcopy(value, memory)
        return twin

    def update(self, other: Dict[str, Any]) -> Dict[str, Any]:
        """Add these values to `other`; AssertionError when a key is in both."""
        shared = set(self._values) & set(other)
        assert not shared, f"Can't merge dictionaries, they have keys in common: {sorted(shared)}"
        other.update(self._values)
        return other

    def toDict(self) -> Dict[str, Any]:
        return self.update({})

    def __call__(self, option: str) -> Any:
        return getattr(self, option)

    def __repr__(self) -> str:
        body = ", ".join(f"{key}={value!r}" for key, value in self._values.items())
        return f"{type(self).__name__}({body})"
