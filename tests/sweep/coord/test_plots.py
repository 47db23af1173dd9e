"""What the pictures show: which steps, which points."""
from __future__ import annotations

from pathlib import Path

import pytest

from ipu_lean.sweep.coord import plots
from tests.mup.made import WIDTHS, figures


@pytest.mark.parametrize(
    "steps, start, panels",
    [
        (range(5), False, [1, 2, 4]),
        (range(5), True, [0, 1, 2, 4]),
        (range(17), False, [1, 2, 4, 8, 16]),
        (range(11), True, [0, 1, 2, 4, 8, 10]),
        (range(65), True, [0, 1, 2, 4, 32, 64]),
    ],
)
def test_panels_are_powers_of_two_and_the_last_step(steps: range, start: bool, panels: list) -> None:
    assert plots.panel_steps(steps, start) == panels


def test_a_curve_is_the_mean_over_seeds_at_every_width() -> None:
    found = figures(seeds=3, change={"stack": 1.0, "embed": None})
    curves = {name: (sizes, values) for name, sizes, values in plots.module_series(found, 4, lambda row: row.change)}
    assert curves["stack"][0] == list(WIDTHS)
    assert curves["stack"][1] == pytest.approx([0.3 * 1.01 * width for width in WIDTHS])  # seeds wobble by 0, 1 and 2 per cent
    assert curves["embed"] == ([], [])  # zero has no place on a logarithmic axis
    names = [name for name, _, _ in plots.tensor_series(found)]
    assert "layers.0.up.weight" in names and "embedding.weight*" in names


def test_pictures_are_drawn_for_what_there_is(tmp_path: Path) -> None:
    rows = [("mup", figures()), ("standard", None)]
    path = plots.plot_coordinates(tmp_path / "changes.png", rows, "change", "title")
    assert path is not None and path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert plots.plot_coordinates(tmp_path / "none.png", [("mup", None)], "change", "title") is None
    assert plots.plot_updates(tmp_path / "none.png", [("mup", None)]) is None
    assert not (tmp_path / "none.png").exists()
