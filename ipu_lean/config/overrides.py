"""`key.path=value` on the command line: the last word on a value, read by the kind of its key."""

from __future__ import annotations

from typing import Any, Dict, get_args, get_origin

from ipu_lean.config.fields import Path, field_at, is_section, is_text, nearest
from ipu_lean.config.messages import mark_of, offer
from ipu_lean.config.yaml_text import Mark, parse_value
from ipu_lean.errors import ConfigError


def apply(tree: Dict[str, Any], marks: Dict[Path, Mark], override: str) -> None:
    """Sets one `key.path=value` in place, marks included. Raises ConfigError for what is no override or no key."""
    name, equals, text = override.partition("=")
    path = tuple(name.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"an override is written key.path=value, not {override!r}", suggestion="for example train.steps=200")
    field, above = field_at(path), field_at(path[:-1])
    in_mapping = above is not None and get_origin(above.annotation) is dict
    if field is None and not in_mapping:
        _check_mapping(path, name, text)
        near = nearest(path)
        rule = "there is no such key" + (f" (did you mean `{near}`?)" if near else "")
        raise ConfigError(rule, key=name, suggestion=None if near else offer(path), file="override")
    value = _as_text(text) if field is not None and is_text(field.annotation) else parse_value(text)
    here = tree
    for depth, word in enumerate(path[:-1], 1):
        if here.get(word) is None:
            here[word] = {}
        here = here[word]
        if not isinstance(here, dict):
            mark = mark_of(path[:depth], marks)
            where = {"file": mark.source, "line": mark.line} if mark else {}
            raise ConfigError("this is a section, so it holds keys of its own", key=".".join(path[:depth]), value=here, **where)
    here[path[-1]] = value
    for old in [mark for mark in marks if mark[: len(path)] == path]:
        del marks[old]
    marks[path] = Mark("override", None, text)


def _check_mapping(path: Path, name: str, text: str) -> None:
    """ConfigError for a path that goes on below a name in a mapping, such as `study.expect.NAME`, where no override reaches."""
    for depth in range(1, len(path) - 1):
        field = field_at(path[:depth])
        if field is None or get_origin(field.annotation) is not dict:
            continue
        # Names that hold mappings are single words (variants); those that hold values may be dotted (a grid's keys).
        held = get_args(field.annotation)[1]
        end = depth + 1 if get_origin(held) is dict or is_section(held) else depth
        shown = f'"{".".join(path[:end])}={{{".".join(path[end:])}: {text}}}"'
        raise ConfigError(
            f"what stands in `{'.'.join(path[:end])}` is given together",
            key=name,
            suggestion=f"write {shown}, with all else that is to stand there",
            file="override",
        )


def _as_text(text: str) -> Any:
    """The value of a text key: as typed, unless YAML's quotes or `null` say otherwise."""
    try:
        value = parse_value(text)
    except ConfigError:
        return text
    return value if isinstance(value, str) or (value is None and text) else text
