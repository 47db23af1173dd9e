"""Axial positions: a row's vector beside a column's, for any sequence that the grid holds."""

from __future__ import annotations

import copy

import pytest
import torch

from ipu_lean.errors import ConfigError
from ipu_lean.nn import AxialPositions

pytestmark = pytest.mark.pod


def by_hand(axial, start, length):
    _, columns = axial.shape
    rows = [torch.cat([axial.rows[t // columns, 0], axial.columns[0, t % columns]]) for t in range(start, start + length)]
    return torch.stack(rows)


@pytest.mark.parametrize("start, length", [(0, 48), (0, 1), (0, 7), (0, 13), (5, 1), (5, 20), (6, 6), (47, 1), (11, 14)])
def test_position_t_is_row_and_column_of_t(start, length):
    axial = AxialPositions((8, 6), (3, 5))
    assert torch.equal(axial(torch.empty(2, length, 8), start), by_hand(axial, start, length))


def test_a_shorter_sequence_trains_the_leading_rows():
    """Hugging Face's refuses it: there the product of the grid is the only length to train with."""
    axial = AxialPositions((8, 8), (2, 4)).train()
    axial(torch.empty(1, 20, 6)).sum().backward()
    assert axial.rows.grad[:, 0, 0].tolist() == [8, 8, 4, 0, 0, 0, 0, 0]
    assert axial.columns.grad[0, :, 0].tolist() == [3, 3, 3, 3, 2, 2, 2, 2]


def test_beyond_the_grid_is_refused_with_a_grid_that_would_do():
    axial = AxialPositions((2, 6), (3, 5))
    with pytest.raises(ConfigError, match=r"position 12 .*12 positions.*\[3, 6\]"):
        axial(torch.empty(1, 13, 8))
    with pytest.raises(ConfigError, match="position 12"):
        axial(torch.empty(1, 1, 8), 12)
    with pytest.raises(ConfigError, match="two positive"):
        AxialPositions((0, 6), (3, 5))


def test_dropout_takes_a_column_of_a_sequence_at_once():
    """As Hugging Face's dropout2d does: all positions of one column, all features, each sequence for itself."""
    torch.manual_seed(0)
    axial = AxialPositions((5, 40), (2, 2), dropout=0.25).train()
    plain = axial.eval()(torch.empty(1, 190, 4))
    found = axial.train()(torch.empty(64, 190, 4))
    assert found.shape == (64, 190, 4)
    kept = (found != 0).all(-1)
    assert torch.equal(kept, (found != 0).any(-1))
    assert torch.equal(kept[:, :40], kept[:, 40:80]) and torch.equal(kept[:, :30], kept[:, 160:])
    assert len({tuple(row) for row in kept[:, :40].tolist()}) > 32
    assert abs(kept[:, :40].float().mean() - 0.75) < 0.03  # four standard deviations of 2560 draws
    assert torch.allclose(found[kept], (plain / 0.75).expand_as(found)[kept])


def test_tables_start_at_the_embedding_size_and_survive_a_copy():
    torch.manual_seed(1)
    axial = AxialPositions((64, 64), (64, 192), std=0.2)
    assert axial.rows.std().item() == pytest.approx(0.2, rel=0.05) and axial.columns.std().item() == pytest.approx(0.2, rel=0.05)
    assert axial.init_stds == {"rows": 0.2, "columns": 0.2}
    twin = copy.deepcopy(axial)
    assert torch.equal(twin(torch.empty(1, 9, 256)), axial(torch.empty(1, 9, 256)))
    assert axial.bfloat16()(torch.empty(1, 9, 256)).dtype == torch.bfloat16


def test_equal_to_hugging_face():
    import sys

    sys.modules.setdefault("torchvision", None)
    reformer = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    from transformers import ReformerConfig

    theirs = reformer.AxialPositionEmbeddings(
        ReformerConfig(axial_pos_shape=(4, 6), axial_pos_embds_dim=[3, 5], hidden_size=8, hidden_dropout_prob=0.0)
    )
    ours = AxialPositions((4, 6), (3, 5))
    with torch.no_grad():
        for weight, table in zip(theirs.weights, (ours.rows, ours.columns)):
            weight.copy_(table)
    places = torch.arange(24)[None]
    assert torch.equal(theirs.train()(places)[0], ours.train()(torch.empty(1, 24, 8)))
    assert torch.equal(theirs.eval()(places[:, :15])[0], ours.eval()(torch.empty(1, 15, 8)))
