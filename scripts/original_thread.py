#!/usr/bin/env python3
"""The experiment that began it: does muP hold on an IPU? Three linear layers on images, and how far their outputs move.

Base width 8, a second model of width 16 that tells what grows. One batch is trained on, and after each update the standard
deviation of x_t - x_0 is taken of every layer's output x: with muP it does not depend on the width. A thin wrapper: the network
is that of configs/cifar_mlp.yaml, the measurement that of `ipu-lean coord-check`.

    python scripts/original_thread.py --width-lower 64 --width-upper 512 --width-step 64 --training-steps 5 --lr 0.01 [--ipu]
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipu_lean.errors import ConfigError, IpuLeanError

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "cifar_mlp.yaml"
Key = Tuple[int, int, str]  # step, width, module


def arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """The thread's flags, and where images come from and results go to."""
    parser = argparse.ArgumentParser(description="Change of activations over widths, with muP.")
    parser.add_argument("--ipu", action="store_true", help="on an IPU, or on the emulated one where PopTorch is not installed")
    parser.add_argument("--width-lower", type=int, default=64, help="the narrowest network (default 64)")
    parser.add_argument("--width-upper", type=int, default=512, help="the widest is at most this wide (default 512)")
    parser.add_argument("--width-step", type=int, default=64, help="from one width to the next (default 64)")
    parser.add_argument("--training-steps", type=int, default=5, help="weight updates (default 5)")
    parser.add_argument("--lr", type=float, default=0.01, help="Adam's learning rate at the base width (default 0.01)")
    parser.add_argument("--images", default="digits", help="as data.images; cifar10:FOLDER is the original's (default digits)")
    parser.add_argument("--batch", type=int, default=64, help="images in the batch (default 64)")
    parser.add_argument("--out", type=Path, default=Path("original_thread"), help="folder of the table and the plot")
    return parser.parse_args(argv)


def widths_of(given: argparse.Namespace) -> List[int]:
    """The widths, both ends included. ConfigError for none."""
    widths = list(range(given.width_lower, given.width_upper + 1, given.width_step)) if given.width_step > 0 else []
    if len(widths) < 2 or widths[0] < 1 or given.training_steps < 1:
        raise ConfigError(
            "two widths and one update are the least that can be compared",
            key="--width-lower, --width-upper, --width-step, --training-steps",
            value=[given.width_lower, given.width_upper, given.width_step, given.training_steps],
        )
    return widths


def measured(given: argparse.Namespace) -> Dict[Key, float]:
    """{(step, width, module): standard deviation of x_t - x_0}, by the coordinate check."""
    import torch

    from ipu_lean.config import load_config
    from ipu_lean.sweep.coord.capture import measure
    from ipu_lean.sweep.coord.rig import rig_of
    from ipu_lean.train.tasks import open_task

    device = "cpu" if not given.ipu else "ipu" if importlib.util.find_spec("poptorch") else "ipu-emulated"
    overrides = [f"device={device}", f"data.images={given.images}", f"optimizer.lr={given.lr}", f"batch.micro={given.batch}"]
    # As it was: a readout of zeros would leave the first update to the head alone.
    overrides.append("mup.readout_zero_init=false")
    config = load_config(CONFIG, overrides)
    print(f"device: {device}, base width {config.mup.base_width}, lr {given.lr:g}", file=sys.stderr)
    task = open_task(config)

    def batch(seed: int) -> Any:
        inputs, labels = task.train_batches(given.batch, seed).next()
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    rig = rig_of(config, batch, task.vocab)
    say = lambda text: print(text, file=sys.stderr)  # noqa: E731
    figures = measure(rig, widths_of(given), given.training_steps, say=say, signatures=False)
    return {(row.step, row.size, row.module): row.change_std for row in figures.coordinates if row.step > 0}


def table(found: Dict[Key, float]) -> str:
    """One block a module: a line a step, a column a width."""
    steps, widths = sorted({key[0] for key in found}), sorted({key[1] for key in found})
    lines = []
    for module in dict.fromkeys(key[2] for key in found):
        lines += [f"{module}: standard deviation of x_t - x_0", "step  " + "".join(f"{width:>11}" for width in widths)]
        for step in steps:
            cells = (found.get((step, width, module), float("nan")) for width in widths)
            lines.append(f"{step:>4}  " + "".join(f"{cell:>11.4g}" for cell in cells))
        lines.append("")
    return "\n".join(lines)


def write(found: Dict[Key, float], folder: Path) -> List[Path]:
    """coordinates.csv and coordinates.png (a panel a module, a curve a step)."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "coordinates.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "width", "module", "change_std"))
        writer.writerows((*key, repr(value)) for key, value in found.items())
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    widths = sorted({key[1] for key in found})
    modules, steps = list(dict.fromkeys(key[2] for key in found)), sorted({key[0] for key in found})
    figure, panels = pyplot.subplots(1, len(modules), figsize=(4 * len(modules), 3.5), sharey=True, squeeze=False)
    for panel, module in zip(panels[0], modules):
        for place, step in enumerate(steps):
            points = sorted((key[1], value) for key, value in found.items() if key[0] == step and key[2] == module)
            colour = pyplot.get_cmap("viridis")(place / max(1, len(steps) - 1))
            panel.plot(*zip(*points), marker="o", markersize=3, color=colour, label=f"step {step}")
        panel.set(title=module, xlabel="width", yscale="log")
        panel.set_xscale("log", base=2)
        panel.set_xticks([width for place, width in enumerate(widths) if place in (0, 1, 3, 7) or width == widths[-1]])
        panel.get_xaxis().set_major_formatter("{x:.0f}")
        panel.get_xaxis().set_minor_formatter("")
    panels[0][0].set_ylabel("standard deviation of x_t - x_0")
    panels[0][-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(folder / "coordinates.png", dpi=120)
    pyplot.close(figure)
    return [path, folder / "coordinates.png"]


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Measure, print, write; the exit code of ipu-lean's errors."""
    try:
        given = arguments(argv)
        widths_of(given)
        found = measured(given)
        print(table(found))
        for path in write(found, given.out):
            print(f"written: {path}")
    except IpuLeanError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
