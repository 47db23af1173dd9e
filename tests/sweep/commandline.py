"""`ipu-lean sweep` as a test calls it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from ipu_lean import cli

WIDE = ["--widths", "16..64", "--lrs", "2^-11..2^-5", "--seeds", "2", "--parametrizations", "mup,standard"]


def sweep(capsys, *arguments):
    """(exit code, the JSON object, stdout, stderr) of `ipu-lean sweep …`."""
    code = cli.main(["sweep", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]), out, err


def table(run):
    """The rows of results.csv."""
    with open(run / "results.csv") as handle:
        return list(csv.DictReader(handle))


def planned(capsys, yaml, *flags):
    """A directory whose trials have not run."""
    code, summary, out, err = sweep(capsys, yaml, *flags, "--out", "out", "--plan")
    assert code == 0 and summary["metrics"]["counts"]["missing"] == summary["metrics"]["counts"]["trials"]
    assert f"{summary['metrics']['counts']['trials']} trials" in err and "judge all: ipu-lean sweep" in out
    return Path("out").absolute()


def moving(standard=-1.0, mup=0.0):
    """Log2 by which the optimum of `fill` moves per doubling of width, by parametrisation."""
    return lambda parametrization: standard if parametrization == "standard" else mup
