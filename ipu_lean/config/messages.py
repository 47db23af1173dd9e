"""pydantic's findings in our words: which key, what stood there, what must hold, what was probably meant."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple, get_origin

from pydantic import ValidationError

from ipu_lean.config.checks import WORKING_PRECISIONS
from ipu_lean.config.fields import Path, field_at, keys_of, nearest
from ipu_lean.config.ipu_rules import IPU_PRECISIONS
from ipu_lean.config.layout import IPU_DEVICES
from ipu_lean.config.yaml_text import Mark
from ipu_lean.errors import ConfigError, did_you_mean

_KINDS = {
    "int_type": "this must be a whole number",
    "int_from_float": "this must be a whole number",
    "float_type": "this must be a number",
    "bool_type": "this must be true or false",
    "string_type": "this must be text",
    "list_type": "this must be a list, such as [0, 3, 3]",
    "tuple_type": "this must be a list",
    "dict_type": "this must be a mapping of names to values",
    "model_type": "this is a section, so it holds keys of its own",
    "model_attributes_type": "this is a section, so it holds keys of its own",
    "finite_number": "this must be a finite number",
    "string_too_short": "this may not be empty",
}
_LIMITS = {
    "greater_than": ("gt", "this must be greater than {}"),
    "greater_than_equal": ("ge", "this must be at least {}"),
    "less_than": ("lt", "this must be less than {}"),
    "less_than_equal": ("le", "this must be at most {}"),
    "string_pattern_mismatch": ("pattern", "this must match {}"),
}

_NULL = {
    ("train", "sample"): "for no sample set `train.sample.tokens=0`",
    ("train", "eval_every"): "to evaluate only at the end set `train.eval_every=0`",
}
"""What someone who wrote `null` to switch a thing off should write."""


def explain(error: ValidationError, marks: Dict[Path, Mark]) -> ConfigError:
    """The first mistake (in the order of the file) as a ConfigError that names its line; the others are counted by name."""
    found = [(_path_of(item["loc"]), item) for item in error.errors()]
    found.sort(key=lambda pair: _line_of(pair[0], marks))
    path, item = found[0]
    rule, suggestion = _rule(path, item, marks)
    others = sorted({".".join(other) for other, _ in found[1:]} - {".".join(path)})
    if others:
        rule += f" (also wrong: {', '.join(others[:4])}{', …' if len(others) > 4 else ''})"
    value = None if item["type"] in ("extra_forbidden", "model_type") or len(repr(item["input"])) > 100 else item["input"]
    mark = mark_of(path, marks)
    return ConfigError(
        rule,
        key=".".join(path),
        value=value,
        suggestion=suggestion,
        file=mark.source if mark else None,
        line=mark.line if mark else None,
    )


def mark_of(path: Path, marks: Dict[Path, Mark]) -> Optional[Mark]:
    """The mark of a path, or of the nearest section above it that was written somewhere."""
    while path and path not in marks:
        path = path[:-1]
    return marks.get(path) if path else None


def _line_of(path: Path, marks: Dict[Path, Mark]) -> Tuple[int, int]:
    mark = mark_of(path, marks)
    return (1, 0) if mark is None else (0, mark.line or 0)


def _path_of(location: Tuple[Any, ...]) -> Path:
    """The part of pydantic's location that a user wrote: it ends where a union's or a container's inside begins."""
    path: List[str] = []
    for word in location:
        if path and field_at(tuple(path)) is not None and not keys_of(tuple(path)):
            # Below a plain field: keep a mapping's key (a name that the user chose), drop indices and union branches.
            if get_origin(field_at(tuple(path)).annotation) is dict:
                path.append(str(word))
            break
        path.append(str(word))
    return tuple(path)


def _rule(path: Path, item: Dict[str, Any], marks: Dict[Path, Mark]) -> Tuple[str, Optional[str]]:
    kind, context, value = item["type"], item.get("ctx", {}), item.get("input")
    if kind == "extra_forbidden":
        near = nearest(path)
        return ("there is no such key" + (f" (did you mean `{near}`?)" if near else "")), (None if near else offer(path))
    if kind == "literal_error":
        choices = [choice.strip().strip("'") for choice in context["expected"].replace(" or ", ", ").split(",")]
        if path == ("precision",):  # only those that this device would not refuse in turn
            device = marks[("device",)].raw if ("device",) in marks else "cpu"
            choices = list(IPU_PRECISIONS if device in IPU_DEVICES else WORKING_PRECISIONS)
        return f"this must be one of {', '.join(choices)}" + (_meant(value, choices) if isinstance(value, str) else ""), None
    if kind in _LIMITS:
        name, sentence = _LIMITS[kind]
        return sentence.format(context[name]), None
    if kind == "value_error":
        return str(context.get("error", item["msg"])), None
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        return _KINDS["int_type"], f"write {int(value)}"
    if kind == "bool_type" and isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
        return _KINDS[kind], f"write {'true' if value.lower() in ('yes', 'on') else 'false'}"
    return _KINDS.get(kind, item["msg"][:1].lower() + item["msg"][1:]), (_NULL.get(path) if value is None else None)


def _meant(value: str, choices: List[str]) -> str:
    """The choices of which `value` is the first word (`bf16`: two of them), else the nearest one, as a question; or nothing."""
    begun = [choice for choice in choices if choice.startswith(f"{value.lower()}-")]
    near = None if begun else did_you_mean(value, choices)
    named = begun or ([near] if near else [])
    return f" (did you mean {' or '.join(f'`{one}`' for one in named)}?)" if named else ""


def offer(path: Path) -> Optional[str]:
    """The keys of the section in which an unknown key stands, as a suggestion; None at the top."""
    keys = keys_of(path[:-1])
    return f"the keys of `{'.'.join(path[:-1])}` are {', '.join(keys)}" if path[:-1] and keys else None
