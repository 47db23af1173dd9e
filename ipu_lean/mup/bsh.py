"""Base-shape files (`.bsh`), readable and writable by the stock `mup` package.

YAML: each tensor's name with the list of its base sizes, `null` for a dimension that does not grow with width. A comment
carries the content's hash; mup ignores it, `load_bsh` checks it.
"""
from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple, Union

import yaml

from ipu_lean.errors import ConfigError

BaseShapes = Dict[str, Tuple[Optional[int], ...]]

_HEADER = """\
# Base shapes, one list a tensor: a number is the size in the base model of a dimension that grows with width,
# null a dimension that does not grow. The stock mup package reads this file too.
# content: {hash}
"""


def base_hash(base_shapes: Mapping[str, Sequence[Optional[int]]]) -> str:
    """12 hex digits over names and sizes, independent of the order of the names."""
    content = json.dumps({name: list(shape) for name, shape in base_shapes.items()}, sort_keys=True)
    return hashlib.sha256(content.encode("utf-8")).hexdigest()[:12]


def save_bsh(base_shapes: Mapping[str, Sequence[Optional[int]]], path: Union[str, os.PathLike[str]]) -> str:
    """Write a `.bsh` file; returns the content's hash."""
    content = base_hash(base_shapes)
    body = yaml.safe_dump({name: list(shape) for name, shape in base_shapes.items()}, indent=4, sort_keys=False)
    with open(path, "w", encoding="utf-8") as file:
        file.write(_HEADER.format(hash=content) + body)
    return content


def load_bsh(path: Union[str, os.PathLike[str]]) -> BaseShapes:
    """Read a `.bsh` file, written here or by mup.

    Raises:
        ConfigError: no such file, not a base-shape file, or changed since it was written (its hash line disagrees).
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        raw = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(
            f"the base-shape file cannot be read ({error.strerror})", key="mup.base", value=str(path)
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("the base-shape file is not YAML", key="mup.base", value=str(path)) from error
    if not isinstance(raw, dict) or not raw or not all(_is_shape(shape) for shape in raw.values()):
        raise ConfigError(
            "a base-shape file maps tensor names to lists of positive whole numbers or null", key="mup.base", value=str(path)
        )
    shapes: BaseShapes = {str(name): tuple(shape) for name, shape in raw.items()}
    written = re.search(r"^# content: ([0-9a-f]{12})$", text, re.MULTILINE)
    if written and written.group(1) != base_hash(shapes):
        raise ConfigError(
            f"the base shapes do not match the file's own hash {written.group(1)}: it was changed after it was written",
            key="mup.base",
            value=str(path),
            suggestion="write it again, or delete its `# content:` line if the change is meant",
        )
    return shapes


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(
        size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0) for size in value
    )
