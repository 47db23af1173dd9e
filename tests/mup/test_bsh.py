"""Base-shape files: ours through ours, ours through mup, mup's through ours."""
from __future__ import annotations

import pytest

from ipu_lean.errors import ConfigError
from ipu_lean.mup import attach_infshapes, base_hash, base_shapes_from_width, load_bsh, save_bsh
from tests.mup.toy import Toy


@pytest.fixture(scope="module")
def base():
    return base_shapes_from_width(Toy, 16)


@pytest.mark.pod
def test_round_trip(tmp_path, base):
    content = save_bsh(base, tmp_path / "a.bsh")
    assert load_bsh(tmp_path / "a.bsh") == base
    assert content == base_hash(base) == base_hash(dict(reversed(list(base.items()))))
    assert content != base_hash(dict(base, **{"norm.weight": (17,)}))


@pytest.mark.pod
@pytest.mark.parametrize("text", ["", "[1, 2]", "a: 3", "a: [1, x]", "a: [0]", "a: [true]", "a: [-1]", "a: [1\n", "\x00"])
def test_not_a_base_shape_file(tmp_path, text):
    (tmp_path / "bad.bsh").write_text(text)
    with pytest.raises(ConfigError, match="base-shape file"):
        load_bsh(str(tmp_path / "bad.bsh"))


@pytest.mark.pod
def test_missing_and_edited(tmp_path, base):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_bsh(tmp_path / "none.bsh")
    save_bsh(base, tmp_path / "a.bsh")
    text = (tmp_path / "a.bsh").read_text().replace("- 16", "- 8", 1)
    (tmp_path / "a.bsh").write_text(text)
    with pytest.raises(ConfigError, match="changed after it was written"):
        load_bsh(tmp_path / "a.bsh")


def test_mup_reads_ours(tmp_path, base):
    mup = pytest.importorskip("mup", reason="the stock package is not installed")
    path = str(tmp_path / "ours.bsh")
    save_bsh(base, path)
    model = mup.set_base_shapes(Toy(64), path, rescale_params=False, do_assert=False)
    own = attach_infshapes(Toy(64), base)
    for (name, theirs), (_, ours) in zip(model.named_parameters(), own.named_parameters()):
        assert theirs.infshape.serialize() == ours.infshape.serialize(), name


def test_we_read_mups(tmp_path, base):
    mup = pytest.importorskip("mup", reason="the stock package is not installed")
    path = str(tmp_path / "theirs.bsh")
    mup.make_base_shapes(Toy(16), Toy(32), savefile=path)
    assert load_bsh(path) == base


def test_mup_saves_a_model_of_ours(tmp_path, base):
    mup = pytest.importorskip("mup", reason="the stock package is not installed")
    path = str(tmp_path / "theirs.bsh")
    mup.save_base_shapes(attach_infshapes(Toy(64), base), path)
    assert load_bsh(path) == base
