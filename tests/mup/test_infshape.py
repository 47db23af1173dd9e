"""Our infinite shapes answer as mup's do."""
from __future__ import annotations

import copy
import pickle

import pytest

from ipu_lean.errors import ConfigError
from ipu_lean.mup import InfDim, InfShape, attach_infshapes, base_shapes_from_width, make_infshape
from tests.mup.toy import Toy


@pytest.mark.pod
def test_by_hand():
    matrix = make_infshape((16, 32), (64, 64))
    assert (matrix.ninf(), matrix.width_mult(), matrix.fanin_fanout_mult_ratio()) == (2, 2.0, 0.5)
    assert matrix.main is matrix[1] and matrix.main_idx == 1
    table = make_infshape((None, 16), (10, 8))
    assert (table.ninf(), table.width_mult(), table.base_shape(), table.shape()) == (1, 0.5, [None, 16], [10, 8])
    assert make_infshape((), ()).width_mult() == 1 and make_infshape((None,), (3,)).ninf() == 0


@pytest.mark.pod
def test_equality_and_copies():
    one = make_infshape((16, None), (32, 3))
    assert one == copy.deepcopy(one) == pickle.loads(pickle.dumps(one))
    assert pickle.loads(pickle.dumps(one)).main.width_mult() == 2
    assert one != InfShape([InfDim(16, 32)]) and one != make_infshape((16, 3), (32, 3))


@pytest.mark.pod
def test_attach_names_what_is_missing():
    base = base_shapes_from_width(Toy, 16)
    del base["norm.weight"]
    with pytest.raises(ConfigError, match="norm.weight"):
        attach_infshapes(Toy(32), base)
    base["norm.weight"] = (16, 16)
    with pytest.raises(ConfigError, match="ranks differ"):
        attach_infshapes(Toy(32), base)


CASES = [((16, 32), (64, 64)), ((None, 16), (3, 4)), ((16, None, None), (8, 3, 3)), ((8,), (24,)), ((), ())]


@pytest.mark.parametrize("base, shape", CASES)
def test_same_answers_as_mup(base, shape):
    stock = pytest.importorskip("mup.infshape", reason="the stock package is not installed")
    theirs = stock.InfShape([stock.InfDim(b, d) for b, d in zip(base, shape)])
    ours = make_infshape(base, shape)
    assert ours.ninf() == theirs.ninf() and ours.width_mult() == theirs.width_mult()
    assert ours.main_idx == theirs.main_idx and ours.serialize() == theirs.serialize()
    if len(shape) >= 2:
        assert ours.fanin_fanout_mult_ratio() == theirs.fanin_fanout_mult_ratio()


def test_stock_initialisers_read_ours():
    """mup.init asks the infshape which scale to use; the hidden std must shrink with sqrt(m), the embedding's must not."""
    mup = pytest.importorskip("mup", reason="the stock package is not installed")
    model = attach_infshapes(Toy(256), base_shapes_from_width(Toy, 16))
    mup.init.normal_(model.blocks[0].up.weight, std=1.0)
    mup.init.normal_(model.embedding.weight, std=1.0)
    assert abs(model.blocks[0].up.weight.std().item() - 0.25) < 0.01
    assert abs(model.embedding.weight.std().item() - 1.0) < 0.1
