"""One tree out of several files: `extends` lays a file over another, `mup.base` takes a model section from elsewhere."""

from __future__ import annotations

import shlex
from pathlib import Path as FilePath
from typing import Any, Dict, Optional, Tuple, Union

from ipu_lean.config.fields import Path, field_at, is_section
from ipu_lean.config.yaml_text import Mark, parse
from ipu_lean.errors import ConfigError

Tree = Dict[str, Any]
Marks = Dict[Path, Mark]
_EXTENDS = "extends "


def read(source: Union[str, FilePath]) -> Tuple[str, str, FilePath]:
    """(text, name for messages, folder) of a YAML file, of a run directory's config.yaml, or of YAML text itself."""
    if isinstance(source, str) and ("\n" in source or ": " in source or not source):
        return source, "text", FilePath(".")
    path = FilePath(source)
    if path.is_dir():
        path = path / "config.yaml"
    try:
        return path.read_text(encoding="utf-8-sig"), str(path), path.parent
    except FileNotFoundError:
        hint = transformers_hint(path.parent) if FilePath(source).is_dir() else None
        raise ConfigError("there is no such file", file=str(path), suggestion=hint or _neighbours(path)) from None
    except UnicodeDecodeError:
        raise ConfigError("this is not a text file in UTF-8", file=str(path)) from None
    except OSError as error:
        raise ConfigError(f"this cannot be read ({error.strerror})", file=str(path)) from None


def transformers_hint(folder: FilePath) -> Optional[str]:
    """What to do with a folder without a config.yaml, if it has the config.json of Hugging Face's transformers."""
    if not (folder / "config.json").is_file():
        return None
    return f"for a folder of Hugging Face's transformers: `ipu-lean convert {shlex.quote(str(folder))}` makes a run of it"


def _neighbours(path: FilePath) -> Optional[str]:
    names = sorted(other.name for other in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    return f"in {path.parent} there are {', '.join(names[:8])}" if names else None


def read_layers(text: str, name: str, folder: FilePath) -> Tuple[Tree, Marks]:
    """The tree of a text, laid over the one that its `extends` names (a path from the file's own folder; one level)."""
    tree, marks = parse(text, name)
    if "extends" not in tree:
        return tree, marks
    target, line = tree.pop("extends"), marks.pop(("extends",)).line
    if not isinstance(target, str):
        raise ConfigError("this must be the path of one YAML file", key="extends", value=target, file=name, line=line)
    try:
        below_text, below_name, _ = read(FilePath(folder / target))
    except ConfigError as error:
        raise ConfigError(f"{error.rule}: {error.file}", key="extends", value=target, file=name, line=line) from None
    below, below_marks = parse(below_text, below_name)
    if "extends" in below:
        raise ConfigError(
            "a file that is extended may not extend another (one level only)",
            key="extends",
            value=below["extends"],
            suggestion=f"copy what {name} needs of it",
            file=below_name,
            line=below_marks[("extends",)].line,
        )
    merged = {path: mark._replace(source=_EXTENDS + mark.source) for path, mark in below_marks.items()}
    _lay_over(below, tree, (), merged, marks)
    return below, merged


def _lay_over(below: Tree, above: Tree, path: Path, below_marks: Marks, above_marks: Marks) -> None:
    """Puts `above` over `below` in place: sections are joined key by key, values (mappings among them) replaced whole."""
    for key, value in above.items():
        here = path + (key,)
        field = field_at(here)
        if field is not None and is_section(field.annotation) and isinstance(value, dict) and isinstance(below.get(key), dict):
            _lay_over(below[key], value, here, below_marks, above_marks)
            continue
        below[key] = value
        for old in [mark for mark in below_marks if mark[: len(here)] == here]:
            del below_marks[old]
        below_marks.update({mark: at for mark, at in above_marks.items() if mark[: len(here)] == here})


def inline_base(tree: Tree, marks: Marks, folder: FilePath) -> None:
    """Replaces a path in `mup.base` by the model section of that file, so that the configuration needs no second file.

    The path is meant from the folder of the file that names it, or from the current one if an override does.
    """
    section = tree.get("mup")
    if not isinstance(section, dict) or not isinstance(section.get("base"), str):
        return
    name, mark = section["base"], marks.get(("mup", "base"), Mark("override", None, None))
    where = {"file": mark.source, "line": mark.line}
    try:
        base, base_marks = read_layers(*read(_home(mark, folder) / name))
    except ConfigError as error:
        rule = f"the base model cannot be read: {str(error).rstrip('.')}"
        raise ConfigError(rule, key="mup.base", value=name, **where) from None
    if not isinstance(base.get("model"), dict):
        raise ConfigError("the base file has no `model` section", key="mup.base", value=name, **where)
    section["base"] = base["model"]
    marks.update({("mup", "base") + at[1:]: base_marks[at] for at in base_marks if at[:1] == ("model",) and at[1:]})


def _home(mark: Mark, folder: FilePath) -> FilePath:
    if mark.source == "override":
        return FilePath(".")
    return FilePath(mark.source[len(_EXTENDS) :]).parent if mark.source.startswith(_EXTENDS) else folder
