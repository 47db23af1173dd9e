"""The loss curve is drawn without a display and without touching pyplot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ipu_lean.train.plots import plot_losses

pytestmark = pytest.mark.pod


def test_a_png_of_both_curves(tmp_path: Path) -> None:
    records = [{"step": step, "split": split, "loss": 1.0 / step} for step in (1, 2, 3) for split in ("train", "valid")]
    records.append({"step": 4, "split": "train", "loss": None})
    path = plot_losses(records, tmp_path / "loss.png", "toy")
    assert path is not None and path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 3000


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert plot_losses([], tmp_path / "loss.png", "toy") is None and not (tmp_path / "loss.png").exists()


def test_pyplot_stays_out(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ipu_lean.train.plots import plot_losses\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plot_losses([{'step': 1, 'split': 'train', 'loss': 1.0}], Path(sys.argv[1]), 't')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.png")], check=True, cwd=root)
