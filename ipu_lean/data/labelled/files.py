"""Labelled texts in files: `.jsonl` (an object a line) and `.csv` or `.tsv` (a header, then a row each), each also as `.gz`."""
from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, TextIO, Tuple

from ipu_lean.data.files import nearby
from ipu_lean.data.sources import sound_text
from ipu_lean.errors import ConfigError

SUFFIXES = (".jsonl", ".csv", ".tsv")
LONGEST = 1 << 30
"""Characters of one field of a .csv; the csv module's own limit is 131,072."""

Pair = Tuple[str, str]
"""(text, label)."""


def suffix_of(path: Path) -> str:
    """The suffix before a `.gz`."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def identity(path: Path, text_key: str, label_key: str) -> Dict[str, Any]:
    """Plain data that changes when the file does."""
    stat = path.stat()
    place = {"path": str(path.resolve()), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    return {"kind": "file", **place, "text_key": text_key, "label_key": label_key}


def read_pairs(path: Path, text_key: str, label_key: str, key: str) -> Iterator[Pair]:
    """Texts and labels in the file's order.

    Raises:
        ConfigError: a line without text or label, an empty text, an encoding other than UTF-8, a damaged file.
    """
    try:
        with _open(path) as file:
            if suffix_of(path) == ".jsonl":
                yield from _jsonl(file, path, text_key, label_key)
            else:
                yield from _csv(file, path, text_key, label_key)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text", key=key, suggestion="convert it first, for example with `iconv -f latin1 -t utf-8`"
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is not a whole gzip file: {error}", key=key) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", key=key, suggestion=nearby(path)) from error


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def _jsonl(file: TextIO, path: Path, text_key: str, label_key: str) -> Iterator[Pair]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"this line is not JSON: {error}", file=str(path), line=number) from error
        if not isinstance(record, dict):
            raise ConfigError("a line is an object with a text and a label", file=str(path), line=number)
        yield _pair(record, text_key, label_key, path, number)


def _csv(file: TextIO, path: Path, text_key: str, label_key: str) -> Iterator[Pair]:
    before = csv.field_size_limit(LONGEST)
    try:
        reader = csv.DictReader(file, delimiter="\t" if suffix_of(path) == ".tsv" else ",", strict=True)
        names = list(reader.fieldnames or ())
        for name, option in ((text_key, "data.text_key"), (label_key, "data.label_key")):
            if names.count(name) > 1:
                rule, hint = f"{names.count(name)} columns have this name", "rename all but one of them"
                raise ConfigError(rule, key=option, value=name, suggestion=hint, file=str(path), line=reader.line_num)
        for record in reader:
            if any(record.get(None) or ()):  # where csv puts what has no column
                raise ConfigError(
                    f"this line has {len(names) + len(record[None])} fields, and the header names {len(names)}",
                    suggestion="put a text that holds the separator in double quotes",
                    file=str(path),
                    line=reader.line_num,
                )
            yield _pair(record, text_key, label_key, path, reader.line_num)
    except csv.Error as error:
        raise ConfigError(f"this line is not CSV: {error}", file=str(path), line=reader.reader.line_num) from error
    finally:
        csv.field_size_limit(before)


def _pair(record: Dict[str, Any], text_key: str, label_key: str, path: Path, line: int) -> Pair:
    for name, option in ((text_key, "data.text_key"), (label_key, "data.label_key")):
        value = record.get(name)
        if name in record and (value is None or (name == label_key and isinstance(value, str) and not value.strip())):
            raise ConfigError(f"there is no value under {name!r} here", suggestion="fill it in", file=str(path), line=line)
        if value is None:
            names = ", ".join(repr(column) for column in record if column is not None)
            raise ConfigError(
                f"there is nothing under {name!r}",
                key=option,
                value=name,
                suggestion=f"its keys are {names}",
                file=str(path),
                line=line,
            )
    text, label = record[text_key], _label(record[label_key])
    if not isinstance(text, str) or not text:
        raise ConfigError(f"the text under {text_key!r} is {'empty' if text == '' else 'no string'}", file=str(path), line=line)
    if label is None:
        raise ConfigError(f"the label under {label_key!r} is neither a string nor an integer", file=str(path), line=line)
    return sound_text(text), label


def _label(value: Any) -> Optional[str]:
    """The name of a class: a string that is not empty, or an integer."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    return sound_text(value.strip()) or None if isinstance(value, str) else None
