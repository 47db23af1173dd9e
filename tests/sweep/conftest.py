"""A tiny configuration in a folder of its own."""

from __future__ import annotations

import pytest


@pytest.fixture
def yaml(tmp_path, monkeypatch):
    """The path of a tiny configuration; relative paths are beside it."""
    from ipu_lean.config import dump_config
    from tests.sweep.helpers import tiny

    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_config(tiny(tmp_path)))
    return str(path)
