"""Token files against numpy arrays in memory."""
from __future__ import annotations

import pickle

import numpy as np
import pytest

from ipu_lean.data import TokenFile
from ipu_lean.data.tokens import DTYPES, suffix_for
from ipu_lean.errors import RunError

pytestmark = pytest.mark.pod


@pytest.fixture(params=[".u16", ".u32"])
def stored(request, tmp_path):
    top = 1 << 16 if request.param == ".u16" else 1 << 31
    ids = np.random.RandomState(0).randint(0, top, size=1000, dtype=np.int64)
    ids[0] = top - 1
    path = tmp_path / ("tokens" + request.param)
    path.write_bytes(ids.astype(DTYPES[request.param]).tobytes())
    return path, ids


def test_read_gives_int32_of_what_was_written(stored):
    path, ids = stored
    file = TokenFile(path)
    assert len(file) == 1000
    assert file.read(0, 1000).dtype == np.int32
    np.testing.assert_array_equal(file.read(0, 1000), ids)
    np.testing.assert_array_equal(file.read(17, 5), ids[17:22])
    assert file.read(1000, 0).shape == (0,)


def test_a_part_of_a_file_counts_from_its_own_start(stored):
    path, ids = stored
    part = TokenFile(path, 100, 350)
    assert len(part) == 250
    np.testing.assert_array_equal(part.read(3, 7), ids[103:110])
    for start, count in [(-1, 2), (0, 251), (250, 1), (3, -1)]:
        with pytest.raises(IndexError):
            part.read(start, count)


def test_windows_are_slices(stored):
    path, ids = stored
    part = TokenFile(path, 100, 350)
    found = part.windows(np.array([3, 0, 3, 34]), 7)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, np.stack([ids[100 + i * 7 : 100 + i * 7 + 8] for i in (3, 0, 3, 34)]))
    for bad in ([35], [-1]):  # (250 - 1) // 7 = 35 windows
        with pytest.raises(IndexError):
            part.windows(np.array(bad), 7)
    assert part.windows(np.array([], dtype=np.int64), 7).shape == (0, 8)


def test_pickles_as_a_path(stored):
    path, ids = stored
    content = pickle.dumps(TokenFile(path, 10, 900))
    assert len(content) < 500
    np.testing.assert_array_equal(pickle.loads(content).read(0, 890), ids[10:900])


def test_a_short_or_missing_file_is_an_explained_error(stored, tmp_path):
    path, _ = stored
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunError, match="damaged: .* bytes"):
        TokenFile(path)
    path.write_bytes(b"\0" * 400)
    with pytest.raises(RunError, match="1,000 tokens are expected"):
        TokenFile(path, 0, 1000)
    with pytest.raises(RunError, match="No such file"):
        TokenFile(tmp_path / "absent.u16")


def test_an_empty_file_has_no_tokens(tmp_path):
    (tmp_path / "tokens.u16").write_bytes(b"")
    assert len(TokenFile(tmp_path / "tokens.u16")) == 0


def test_the_narrowest_type_that_holds_the_vocabulary():
    assert suffix_for(257) == suffix_for(65536) == ".u16"
    assert suffix_for(65537) == ".u32"
    assert np.iinfo(DTYPES[suffix_for(65536)]).max >= 65535
