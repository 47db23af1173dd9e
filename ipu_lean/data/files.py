"""Corpora that are files: one file, a folder or a glob of `.txt`, `.md` and `.jsonl`, each also as `.gz`.

A plain file is one document; each line of a `.jsonl` is one. Text is UTF-8 and is kept as it is (line ends too); only a byte
order mark at the beginning is dropped.
"""
from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterable, Iterator, List, Optional, Tuple

from ipu_lean.data.sources import BLOCK, Fragment, Source, sound_text, split_document
from ipu_lean.errors import ConfigError, did_you_mean

SUFFIXES = (".txt", ".md", ".jsonl")


def open_files(spec: str, *, text_key: str, limit: Optional[int], key: str) -> Source:
    """The source for a path, folder or glob; ConfigError if there is nothing to read."""
    paths, root = find_files(spec, key)

    def read(source: Source) -> Iterator[Fragment]:
        done = 0
        for path in paths:
            for fragment, position in read_file(path, text_key=text_key, key=key):
                source.consumed = done + position
                yield fragment
            done = source.consumed

    def identity() -> Dict[str, Any]:
        return {"kind": "files", "root": str(root.resolve()), "text_key": text_key, **stat_digest(paths, root)}

    try:
        found, size = identity(), sum(path.stat().st_size for path in paths)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", key=key, value=spec) from error
    return Source(spec, root.stem or "files", found, read, size=size, limit=limit, refresh=identity)


def find_files(spec: str, key: str) -> Tuple[List[Path], Path]:
    """(files in sorted order, the folder or file they were found under)."""
    path = Path(spec).expanduser()
    if path.is_file():
        return [path], path
    if path.is_dir():
        paths = sorted(entry for entry in path.rglob("*") if is_text(entry.relative_to(path)) and entry.is_file())
        if not paths:
            raise ConfigError(f"the folder holds no {', '.join(SUFFIXES)} file (or .gz of one)", key=key, value=spec)
        return paths, path
    if glob.has_magic(spec):
        paths = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if os.path.isfile(match))
        if not paths:
            raise ConfigError("no file matches this pattern", key=key, value=spec)
        return paths, Path(os.path.commonpath([str(match.parent) for match in paths]))
    if path.exists():
        raise ConfigError("this is neither a regular file nor a folder", key=key, value=spec)
    raise ConfigError("there is no such file or folder", key=key, value=spec, suggestion=nearby(path))


def is_text(relative: Path) -> bool:
    """True for the names that a folder's walk takes: known suffixes, nothing hidden."""
    name = relative.name[:-3] if relative.name.endswith(".gz") else relative.name
    return name.endswith(SUFFIXES) and not any(part.startswith(".") for part in relative.parts)


def nearby(path: Path) -> Optional[str]:
    """A suggestion for a path that does not exist."""
    if not path.parent.is_dir():
        return f"the folder `{path.parent}` does not exist either; relative paths start at `{Path.cwd()}`"
    names = {entry.stem: entry.name for entry in path.parent.iterdir()}  # by the stem: `.txt` makes all names look alike
    near = did_you_mean(path.stem, names, cutoff=0.7)
    return f"did you mean `{path.parent / names[near]}`?" if near else f"relative paths start at `{Path.cwd()}`"


def stat_digest(paths: Iterable[Path], root: Path) -> Dict[str, Any]:
    """Number of files, and one sha256 over every file's name, size and modification time."""
    digest, count = hashlib.sha256(), 0
    for path in paths:
        stat = path.stat()
        digest.update(f"{os.path.relpath(path, root)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
        count += 1
    return {"files": count, "stat_sha256": digest.hexdigest()}


def read_file(path: Path, *, text_key: str, key: str) -> Iterator[Tuple[Fragment, int]]:
    """`((text, ends_document), bytes of the file read so far)`."""
    packed = path.suffix == ".gz"
    lines = Path(path.stem if packed else path.name).suffix == ".jsonl"
    try:
        with open(path, "rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if packed else raw
            fragments = jsonl_fragments(file, path, text_key, key) if lines else plain_fragments(file, path, key)
            for fragment in fragments:
                yield fragment, raw.tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is not a whole gzip file: {error}", key=key) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", key=key) from error


def plain_fragments(file: BinaryIO, path: Path, key: str) -> Iterator[Fragment]:
    """One document: the decoded blocks of the file, the last one marked."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    position, held = 0, None
    while True:
        block = file.read(BLOCK)
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise not_utf8(path, f"byte {position - pending + error.start:,}", key, block) from error
        position += len(block)
        if text:
            if held is not None:
                yield held, False
            held = text
        if not block:
            break
    if held is not None:
        yield held, True


def jsonl_fragments(file: BinaryIO, path: Path, text_key: str, key: str) -> Iterator[Fragment]:
    """One document a line: the string under `text_key`. Empty lines and empty texts are passed over."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise not_utf8(path, f"line {number:,}", key, line) from error
        except ValueError as error:
            raise ConfigError(f"this line is not JSON: {error}", file=str(path), line=number) from error
        if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
            if isinstance(record, dict) and text_key in record:
                raise ConfigError(f"the text under {text_key!r} is not a string", file=str(path), line=number)
            raise ConfigError(
                f"this line has no text under the key {text_key!r}",
                key="data.text_key",
                value=text_key,
                suggestion=f"its keys are {', '.join(map(repr, record))}" if isinstance(record, dict) else "a line is an object",
                file=str(path),
                line=number,
            )
        yield from split_document(sound_text(record[text_key]))


def not_utf8(path: Path, place: str, key: str, around: bytes) -> ConfigError:
    """The error for text in another encoding, or for a file that is no text (`around`: the bytes that were read there)."""
    if b"\0" in around and not around.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return ConfigError(f"{path} is a binary file, not text: it holds NUL bytes", key=key)
    return ConfigError(
        f"{path} is not UTF-8 text ({place})",
        key=key,
        suggestion="if it is text in another encoding, convert it first, for example with `iconv -f latin1 -t utf-8`",
    )
