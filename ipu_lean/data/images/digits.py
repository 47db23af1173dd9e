"""The 1,797 handwritten digits of 8 x 8 (Alpaydin and Kaynak 1998) that come with the package scikit-learn.

The package's data file is read, and the package is not imported: it would bring SciPy along, which a POD need not have.
"""
from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np

from ipu_lean.data.packages import package_folder
from ipu_lean.data.sources import file_sha256
from ipu_lean.errors import EnvironmentProblem

SIZE = (64, 10)


def find(key: str) -> Path:
    """The data file. EnvironmentProblem if the package is not installed, or keeps its data elsewhere."""
    folder = package_folder("sklearn")
    if folder is None:
        raise EnvironmentProblem(
            f"`{key}: digits` is read from the package scikit-learn, which is not installed: `pip install scikit-learn` (the "
            "extra `images` of this package brings it), or name images of yours (a .npz file)."
        )
    path = folder / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise EnvironmentProblem(
            f"The installed scikit-learn has no {path.name} where it is known to keep it ({path.parent}): install it again, or "
            f"set {key} to images of yours."
        )
    return path


def identity(path: Path) -> Dict[str, Any]:
    """Changes with the content."""
    return {"kind": "digits", "sha256": file_sha256(path)}


def read(path: Path) -> Tuple[np.ndarray, np.ndarray]:
    """(uint8 `[1797, 64]` of 0 .. 16, classes)."""
    try:
        table = np.loadtxt(io.StringIO(gzip.decompress(path.read_bytes()).decode("ascii")), delimiter=",")
    except (OSError, EOFError, ValueError) as error:
        raise EnvironmentProblem(f"{path} is damaged ({error}): install scikit-learn again.") from error
    if table.ndim != 2 or table.shape[1] != SIZE[0] + 1:
        raise EnvironmentProblem(f"{path} is not the table of 65 columns that it should be: install scikit-learn again.")
    return table[:, :-1].astype(np.uint8), table[:, -1].astype(np.int64)
