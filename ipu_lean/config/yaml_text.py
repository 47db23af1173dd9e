"""YAML read the way people write it: `6e-5` and `1_000` are numbers, bools are true or false, a key stands once.

PyYAML follows YAML 1.1, where `6e-5` is a string, `010` is eight, `1:30` is ninety, `no` is false and the last of two equal
keys wins. Here scalars follow the JSON-like rules below, and every value remembers its line and its text.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import yaml

from ipu_lean.errors import ConfigError

Path = Tuple[str, ...]
INT = re.compile(r"^[-+]?[0-9]+(?:_[0-9]+)*$")
FLOAT = re.compile(
    r"^[-+]?(?:[0-9]+(?:_[0-9]+)*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_RULES = (
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789")),
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
)


class Mark(NamedTuple):
    """Where a value was written: the file (or other origin), its line counted from 1, and a scalar's own text."""

    source: str
    line: Optional[int]
    raw: Optional[str]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: Dict[str, List[Any]] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: Dict[str, List[Any]] = {}


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # Only double quotes escape the line breaks of Unicode; the other styles fold them into plain ones.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _text_node)


for _kind in (_Loader, _Dumper):
    for _tag, _pattern, _first in _RULES:
        _kind.add_implicit_resolver(_tag, _pattern, _first)


def parse(text: str, source: str) -> Tuple[Dict[str, Any], Dict[Path, Mark]]:
    """Reads a mapping of sections.

    Returns:
        The values as nested dicts, and a mark for every path in them.

    Errors:
        ConfigError, with file and line, for broken YAML, duplicate keys, keys that are no words, and foreign tags.
    """
    node = _compose(text, source)
    if node is None:
        return {}, {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError("a configuration is a mapping of keys to values", file=source, line=node.start_mark.line + 1)
    marks: Dict[Path, Mark] = {}
    return _plain(node, (), source, marks, ()), marks


def parse_value(text: str) -> Any:
    """One value, as in an override (`[0, 3, 3]`, `6e-5`, `null`). Raises ConfigError if it is not YAML."""
    node = _compose(text, "override")
    return None if node is None else _plain(node, (), "override", {}, ())


def to_text(values: Dict[str, Any]) -> str:
    """YAML that `parse` reads back to equal values; keys stay in order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)


def _compose(text: str, source: str) -> Optional[yaml.Node]:
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"this is not valid YAML: {problem}", file=source, line=mark.line + 1 if mark else None) from None
    except RecursionError:
        raise ConfigError("this is nested too deeply to be a configuration", file=source) from None
    finally:
        if loader is not None:
            loader.dispose()


def _plain(node: yaml.Node, path: Path, source: str, marks: Dict[Path, Mark], above: Tuple[int, ...]) -> Any:
    line = node.start_mark.line + 1
    if id(node) in above:
        raise ConfigError("this alias contains itself", key=".".join(path), file=source, line=line)
    above = above + (id(node),)
    if isinstance(node, yaml.ScalarNode):
        marks[path] = Mark(source, line, node.value)
        return _scalar(node, path, source)
    marks[path] = Mark(source, line, None)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(child, path + (str(i),), source, marks, above) for i, child in enumerate(node.value)]
    return _mapping(node, path, source, marks, above)


def _mapping(node: yaml.MappingNode, path: Path, source: str, marks: Dict[Path, Mark], above: Tuple[int, ...]) -> Dict[str, Any]:
    values: Dict[str, Any] = {}
    first: Dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError("a key must be a word", key=".".join(path) or None, file=source, line=line)
        key = key_node.value
        here = path + (key,)
        if key in values:
            raise ConfigError(
                f"this key stands twice, on line {first[key]} and on line {line}",
                key=".".join(here),
                suggestion="keep one of them",
                file=source,
                line=line,
            )
        first[key] = line
        values[key] = _plain(value_node, here, source, marks, above)
        marks[here] = marks[here]._replace(line=line)
    return values


def _scalar(node: yaml.ScalarNode, path: Path, source: str) -> Any:
    kind, text = node.tag.rpartition(":")[2], node.value
    if kind == "str":
        return text
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    try:
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text.replace(".inf", "inf").replace(".nan", "nan") if text.strip("+-.").isalpha() else text)
    except ValueError:
        pass
    rule = "this number cannot be read" if kind in ("int", "float") else f"a value with the tag {node.tag} is not read here"
    raise ConfigError(rule, key=".".join(path) or None, file=source, line=node.start_mark.line + 1)
