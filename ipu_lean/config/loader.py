"""From a YAML file and overrides to one frozen Config, with the origin of every value."""
from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple, Union

from pydantic import ValidationError

from ipu_lean.config.checks import check
from ipu_lean.config.fields import Path, field_at, is_section, is_text, leaves, nearest
from ipu_lean.config.messages import explain, mark_of
from ipu_lean.config.root import Config
from ipu_lean.config.yaml_text import Mark, parse, parse_value
from ipu_lean.errors import ConfigError

Tree = Dict[str, Any]
Marks = Dict[Path, Mark]


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
    text, name, folder = _read(source)
    tree, marks = parse(text, name)
    tree, marks = _extend(tree, marks, folder, name)
    for override in overrides:
        _apply(tree, marks, override)
    _inline_base(tree, marks, folder)
    return Loaded(_build(tree, marks), _provenance(tree, marks), text)


def make_config(**sections: Any) -> Config:
    """A checked Config from nested keyword arguments: `make_config(seed=1, model={"width": 64}, mup={"base_width": 64})`."""
    return _build(dict(sections), {})


def _read(source: Union[str, FilePath]) -> Tuple[str, str, FilePath]:
    if isinstance(source, str) and ("\n" in source or ": " in source or not source):
        return source, "text", FilePath(".")
    path = FilePath(source)
    if path.is_dir():
        path = path / "config.yaml"
    try:
        return path.read_text(encoding="utf-8-sig"), str(path), path.parent
    except FileNotFoundError:
        raise ConfigError("there is no such file", file=str(path), suggestion=_neighbours(path)) from None
    except UnicodeDecodeError:
        raise ConfigError("this is not a text file in UTF-8", file=str(path)) from None
    except OSError as error:
        raise ConfigError(f"this cannot be read ({error.strerror})", file=str(path)) from None


def _neighbours(path: FilePath) -> Optional[str]:
    names = sorted(other.name for other in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    return f"in {path.parent} there are {', '.join(names[:8])}" if names else None


def _extend(tree: Tree, marks: Marks, folder: FilePath, name: str) -> Tuple[Tree, Marks]:
    """Lays the tree over the one that its `extends` names."""
    if "extends" not in tree:
        return tree, marks
    target, line = tree.pop("extends"), marks.pop(("extends",)).line
    if not isinstance(target, str):
        raise ConfigError("this must be the path of one YAML file", key="extends", value=target, file=name, line=line)
    try:
        text, below_name, _ = _read(FilePath(folder / target))
    except ConfigError as error:
        raise ConfigError(f"{error.rule} as {error.file}", key="extends", value=target, file=name, line=line) from None
    below, below_marks = parse(text, below_name)
    if "extends" in below:
        raise ConfigError(
            "a file that is extended may not extend another (one level only)",
            key="extends",
            value=below["extends"],
            suggestion=f"name both keys' values in {name}",
            file=below_name,
            line=below_marks[("extends",)].line,
        )
    merged_marks = {path: mark._replace(source=f"extends {mark.source}") for path, mark in below_marks.items()}
    _merge(below, tree, (), merged_marks, marks)
    return below, merged_marks


def _merge(below: Tree, above: Tree, path: Path, below_marks: Marks, above_marks: Marks) -> None:
    """Puts `above` over `below` in place: sections are joined key by key, values (mappings among them) replaced whole."""
    for key, value in above.items():
        here = path + (key,)
        field = field_at(here)
        if field is not None and is_section(field.annotation) and isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(below[key], value, here, below_marks, above_marks)
            continue
        below[key] = value
        for old in [mark for mark in below_marks if mark[: len(here)] == here]:
            del below_marks[old]
        below_marks.update({mark: at for mark, at in above_marks.items() if mark[: len(here)] == here})


def _apply(tree: Tree, marks: Marks, override: str) -> None:
    """Sets one `key.path=value` in place."""
    name, equals, text = override.partition("=")
    path = tuple(name.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"an override is written key.path=value, not {override!r}", suggestion="for example train.steps=200")
    field = field_at(path)
    inside_mapping = field is None and len(path) > 1 and field_at(path[:-1]) is not None and not is_section(field_at(path[:-1]).annotation)
    if field is None and not inside_mapping:
        near = nearest(path)
        raise ConfigError("there is no such key" + (f" (did you mean `{near}`?)" if near else ""), key=name, file="override")
    if field is not None and is_text(field.annotation):
        value = _text_value(text)
    else:
        value = parse_value(text)
    here = tree
    for word in path[:-1]:
        if not isinstance(here.get(word), dict):
            here[word] = {}
        here = here[word]
    here[path[-1]] = value
    for old in [mark for mark in marks if mark[: len(path)] == path]:
        del marks[old]
    marks[path] = Mark("override", None, text)


def _text_value(text: str) -> Any:
    """An override of a text key: taken as typed, unless YAML quotes or `null` say otherwise."""
    try:
        value = parse_value(text)
    except ConfigError:
        return text
    return value if isinstance(value, str) or (value is None and text) else text


def _inline_base(tree: Tree, marks: Marks, folder: FilePath) -> None:
    """Replaces the path in `mup.base` by the model section of that file, so that the configuration needs no second file."""
    section = tree.get("mup")
    if not isinstance(section, dict) or not isinstance(section.get("base"), str):
        return
    name, mark = section["base"], marks.get(("mup", "base"), Mark("override", None, None))
    where = {"file": mark.source, "line": mark.line}
    path = FilePath(name) if mark.source == "override" else _beside(mark.source, folder) / name
    try:
        text, source, base_folder = _read(path)
        base, base_marks = parse(text, source)
        base, _ = _extend(base, base_marks, base_folder, source)
    except ConfigError as error:
        raise ConfigError(f"the base model cannot be read: {error}", key="mup.base", value=name, **where) from None
    if not isinstance(base.get("model"), dict):
        raise ConfigError("the base file has no `model` section", key="mup.base", value=name, **where)
    section["base"] = base["model"]


def _beside(source: str, folder: FilePath) -> FilePath:
    return FilePath(source[len("extends ") :]).parent if source.startswith("extends ") else folder


def _build(tree: Tree, marks: Marks) -> Config:
    """Validates the tree, then the rules that join sections; errors carry the line of the key at fault."""
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


def _restore_text(values: Tree, path: Path, marks: Marks) -> None:
    """Where a key takes text, a scalar that merely looks like a number or a bool gets its own spelling back."""
    for key, value in values.items():
        here = path + (key,)
        if isinstance(value, dict):
            _restore_text(value, here, marks)
        elif isinstance(value, (bool, int, float)) and here in marks and marks[here].raw is not None:
            field = field_at(here)
            if field is not None and is_text(field.annotation):
                values[key] = marks[here].raw


def _provenance(tree: Tree, marks: Marks) -> Dict[str, str]:
    found = {}
    for path, _ in leaves():
        here: Any = tree
        for word in path:
            here = here.get(word, _ABSENT) if isinstance(here, dict) else _ABSENT
        mark = None if here is _ABSENT else _first_mark(path, marks)
        found[".".join(path)] = "default" if mark is None else (mark.source if mark.line is None else f"{mark.source}:{mark.line}")
    return found


_ABSENT = object()


def _first_mark(path: Path, marks: Marks) -> Optional[Mark]:
    """The mark of a value, or (for a mapping built by overrides alone) of the first thing inside it."""
    return marks.get(path) or next((mark for other, mark in marks.items() if other[: len(path)] == path), None)
