"""From a YAML file and overrides to one frozen Config, with the origin of every value."""

from __future__ import annotations

import copy
from pathlib import Path as FilePath
from typing import Any, Dict, NamedTuple, Optional, Sequence, Union

from pydantic import ValidationError

from ipu_lean.config.checks import check
from ipu_lean.config.fields import Path, field_at, is_section, is_text, leaves
from ipu_lean.config.layers import Marks, Tree, inline_base, read, read_layers
from ipu_lean.config.messages import explain, mark_of
from ipu_lean.config.overrides import apply
from ipu_lean.config.root import Config
from ipu_lean.config.yaml_text import Mark
from ipu_lean.errors import ConfigError


class Loaded(NamedTuple):
    """What `load` returns: the configuration, where each value came from, and the text that was read.

    `provenance` maps every dotted key to `default`, `FILE:LINE`, `extends FILE:LINE` or `override`.
    """

    config: Config
    provenance: Dict[str, str]
    text: str


def load_config(source: Union[str, FilePath], overrides: Sequence[str] = ()) -> Config:
    """`load(...)` for those who need only the configuration."""
    return load(source, overrides).config


def load(source: Union[str, FilePath], overrides: Sequence[str] = ()) -> Loaded:
    """Reads a configuration and checks it as a whole.

    Args:
        source: a YAML file, a run directory (its config.yaml), or YAML text (a string with a line break or a `key: value`).
        overrides: `key.path=value`, applied in order; they win over the file, which wins over what it extends.

    Errors:
        ConfigError naming the key, the value, the rule and where it was written.
    """
    text, name, folder = read(source)
    tree, marks = read_layers(text, name, folder)
    inline_base(tree, marks, folder)
    for override in overrides:
        apply(tree, marks, override)
    inline_base(tree, marks, folder)
    return Loaded(_build(tree, marks), _provenance(tree, marks), text)


def make_config(**sections: Any) -> Config:
    """A checked Config from nested keyword arguments: `make_config(seed=1, model={"width": 64}, mup={"base_width": 64})`."""
    tree, marks = copy.deepcopy(sections), {}
    inline_base(tree, marks, FilePath("."))
    return _build(tree, marks)


def _build(tree: Tree, marks: Marks) -> Config:
    """Validates the tree, then the rules that join sections; errors carry the line of the key at fault."""
    tree = {key: {} if value is None and is_section(_annotation((key,))) else value for key, value in tree.items()}
    _restore_text(tree, (), marks)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise explain(error, marks) from None
    try:
        check(config)
    except ConfigError as error:
        mark = mark_of(tuple((error.key or "").split(".")), marks)
        if mark is not None and error.file is None:
            error.file, error.line = mark.source, mark.line
        raise
    return config


def _annotation(path: Path) -> Any:
    field = field_at(path)
    return None if field is None else field.annotation


def _restore_text(values: Tree, path: Path, marks: Marks) -> None:
    """Where a key takes text, a scalar that merely looks like a number or a bool gets its own spelling back."""
    for key, value in values.items():
        here = path + (key,)
        if isinstance(value, dict):
            _restore_text(value, here, marks)
        elif isinstance(value, (bool, int, float)) and is_text(_annotation(here)) and here in marks:
            values[key] = value if marks[here].raw is None else marks[here].raw


def _provenance(tree: Tree, marks: Marks) -> Dict[str, str]:
    found = {}
    for path, _ in leaves():
        mark = _origin(path, marks) if _is_written(path, tree) else None
        if mark is None:
            found[".".join(path)] = "default"
        else:
            found[".".join(path)] = mark.source if mark.line is None else f"{mark.source}:{mark.line}"
    return found


def _is_written(path: Path, tree: Any) -> bool:
    for word in path:
        if not isinstance(tree, dict) or word not in tree:
            return False
        tree = tree[word]
    return True


def _origin(path: Path, marks: Marks) -> Optional[Mark]:
    """The mark of a value, or (for a mapping that overrides built) of the first thing inside it."""
    return marks.get(path) or next((mark for other, mark in marks.items() if other[: len(path)] == path), None)
