#!/usr/bin/env bash
# Installs what the tests need into .venv and runs them on two cores. More arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh test,bench
python=${VENV:-.venv}/bin/python
# mup, the reference for our muP: only its source archive is complete, and its requirements (torchvision!) are not needed.
"$python" -c "import mup" 2>/dev/null || "$python" -m pip install -q --no-deps --no-binary mup mup==1.0.0
OMP_NUM_THREADS=1 "$python" -m pytest -q -n 2 "$@"
