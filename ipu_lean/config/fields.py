"""Questions about the schema itself: which keys there are, what kind each is, which looks like a mistyped one."""

from __future__ import annotations

import difflib
from typing import Any, Dict, Iterator, List, Optional, Tuple, Type, Union, get_args, get_origin

from ipu_lean.config.root import Config
from ipu_lean.config.section import Section
from ipu_lean.errors import did_you_mean

Path = Tuple[str, ...]


def section_of(annotation: Any) -> Optional[Type[Section]]:
    """The section class that a field's annotation names, seen through Optional; None for a plain value."""
    for kind in (annotation,) + tuple(get_args(annotation) if get_origin(annotation) is Union else ()):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def is_section(annotation: Any) -> bool:
    """Whether the field is a section and always there (muP's base model is not: it may be null)."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def is_text(annotation: Any) -> bool:
    """Whether the field takes a string and no number, so that `name: 2024` is meant as text."""
    kinds = get_args(annotation) if get_origin(annotation) is Union else (annotation,)
    return str in kinds and not any(kind in (int, float, bool) for kind in kinds)


def field_at(path: Path) -> Optional[Any]:
    """pydantic's description of the field at a path, or None if there is no such field."""
    kind: Optional[Type[Section]] = Config
    found: Optional[Any] = None
    for word in path:
        found = kind.model_fields.get(word) if kind is not None else None
        if found is None:
            return None
        kind = section_of(found.annotation)
    return found


def takes_list(key: str) -> bool:
    """Whether a single value of this key is itself a list, such as optimizer.betas."""
    field = field_at(tuple(key.split(".")))
    kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
    return any(get_origin(kind) in (list, tuple) for kind in kinds)


def leaves(kind: Type[Section] = Config, above: Path = ()) -> Iterator[Tuple[Path, Any]]:
    """(path, field) of every value in the schema, in the order of the files; an optional section counts as one value."""
    for name, field in kind.model_fields.items():
        if is_section(field.annotation):
            yield from leaves(field.annotation, above + (name,))
        else:
            yield above + (name,), field


def keys_of(path: Path) -> List[str]:
    """The keys that a section has."""
    if not path:
        return list(Config.model_fields)
    field = field_at(path)
    kind = section_of(field.annotation) if field is not None else None
    return list(kind.model_fields) if kind is not None else []


def nearest(path: Path) -> Optional[str]:
    """The key that an unknown one probably meant. In its own section: a close neighbour, then what it abbreviates. Then a
    namesake elsewhere, anything near in the section; and anything near elsewhere, unless the section is there and right."""
    word, home = path[-1], path[:-1]
    own = keys_of(home)
    by_last: Dict[str, str] = {name: name for name in Config.model_fields}
    for other, _ in sorted(leaves(), key=lambda leaf: leaf[0][0] != "train"):  # `steps` are train's before schedule's
        by_last.setdefault(other[-1], ".".join(other))
    close = difflib.get_close_matches(word, own, n=1, cutoff=0.8) or ([] if word in by_last else _abbreviated(word, own))
    if close:
        return ".".join(home + (close[0],))
    if word in by_last:
        return by_last[word]
    near = did_you_mean(word, own)
    if near is not None:
        return ".".join(home + (near,))
    far = did_you_mean(word, by_last, cutoff=0.8 if home and own else 0.55)
    return by_last[far] if far is not None else None


def _abbreviated(word: str, keys: List[str]) -> List[str]:
    """The one key that `word` abbreviates, if there is just one: `wd` and `w_decay` are weight_decay."""
    parts = word.split("_")
    found = []
    for key in keys:
        words = key.split("_")
        initials = len(word) > 1 and word == "".join(part[0] for part in words)
        if initials or (len(parts) == len(words) and all(whole.startswith(part) for part, whole in zip(parts, words))):
            found.append(key)
    return found if len(found) == 1 else []
