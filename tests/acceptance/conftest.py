"""Long tests, run by scripts/acceptance.sh; the suite holds a small sample of each."""

from __future__ import annotations

import os
from typing import Any, Iterator, List

import pytest

from tests.train.zygote import Zygote


def pytest_collection_modifyitems(items: List[Any]) -> None:
    """Skip this folder's tests unless they were asked for."""
    if os.environ.get("IPU_LEAN_ACCEPTANCE"):
        return
    skip = pytest.mark.skip(reason="long: scripts/acceptance.sh runs it")
    for item in items:
        if "acceptance" in item.path.parts if hasattr(item, "path") else "acceptance" in str(item.fspath):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One server of forked command lines."""
    with Zygote() as server:
        yield server
