"""Shared pieces of this room's tests."""

from __future__ import annotations

from typing import Iterator

import pytest

from tests.train.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One server of forked command lines for the session."""
    with Zygote() as server:
        yield server
