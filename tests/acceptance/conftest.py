"""Long tests, run by scripts/acceptance.sh; the suite holds a small sample of each."""

from __future__ import annotations

import os
from typing import Iterator

import pytest

from tests.train.zygote import Zygote

# Without being asked for they are not even collected: hundreds of skips would hide the ones that say something.
collect_ignore_glob = [] if os.environ.get("IPU_LEAN_ACCEPTANCE") else ["test_*.py"]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One server of forked command lines."""
    with Zygote() as server:
        yield server
