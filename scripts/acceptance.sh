#!/usr/bin/env bash
# The long tests: many seeds and many kills, of which the suite runs a small sample. More arguments go to pytest.
# PYTHON: the Python to use (.venv's, else python3).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export IPU_LEAN_ACCEPTANCE=1 OMP_NUM_THREADS=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m pytest -q tests/acceptance "$@"
