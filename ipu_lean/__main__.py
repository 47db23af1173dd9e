"""`python -m ipu_lean`: the same as the command `ipu-lean`."""
from __future__ import annotations

import sys

from ipu_lean.cli import main

if __name__ == "__main__":
    sys.exit(main())
