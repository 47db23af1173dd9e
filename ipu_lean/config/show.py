"""`config show`: every value, marked where it differs from the default, with its origin."""

from __future__ import annotations

import json
from typing import Any, Dict, List

from ipu_lean.config.fields import leaves
from ipu_lean.config.loader import Loaded
from ipu_lean.config.root import Config


def rows(loaded: Loaded) -> List[Dict[str, Any]]:
    """One `{key, value, default, changed, source}` per value, in the order of the schema; plain JSON-able data."""
    values, defaults = loaded.config.model_dump(mode="json"), Config().model_dump(mode="json")
    found = []
    for path, _ in leaves():
        key, value, default = ".".join(path), _at(values, path), _at(defaults, path)
        source = loaded.provenance[key]
        found.append({"key": key, "value": value, "default": default, "changed": value != default, "source": source})
    return found


def as_yaml(loaded: Loaded, changed_only: bool = False) -> str:
    """YAML that loads back to the same configuration; values that differ from the default carry a comment that says so."""
    lines: List[str] = []
    open_sections: List[str] = []
    for row in rows(loaded):
        if changed_only and not row["changed"]:
            continue
        *sections, name = row["key"].split(".")
        shared = 0
        while shared < min(len(sections), len(open_sections)) and sections[shared] == open_sections[shared]:
            shared += 1
        lines += [f"{'  ' * depth}{word}:" for depth, word in enumerate(sections) if depth >= shared]
        open_sections = sections
        line = f"{'  ' * len(sections)}{name}: {_flow(row['value'])}"
        if row["changed"]:
            line = f"{line:<40}  # {row['source']}; default {_flow(row['default'])}"
        elif row["source"] != "default":
            line = f"{line:<40}  # {row['source']}; as the default"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """A value on one line; JSON is YAML."""
    if (
        isinstance(value, str)
        and value
        and value.replace("-", "").replace("_", "").isalpha()
        and value.lower() not in ("true", "false", "null")
    ):
        return value
    return json.dumps(value, ensure_ascii=False)


def _at(values: Any, path: Any) -> Any:
    for word in path:
        values = values[word]
    return values
