"""A small corpus in files; and property tests that draw the same examples each time, however slow the machine."""
from __future__ import annotations

import pytest
from hypothesis import settings

from tests.data.helpers import DOCUMENTS

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


@pytest.fixture
def text(tmp_path):
    """A folder of four documents, two of them longer than a piece, and an empty one."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number, document in enumerate(DOCUMENTS):
        (folder / f"{number}.txt").write_bytes(document.encode("utf-8"))
    (folder / "1-empty.txt").write_bytes(b"")
    return folder
