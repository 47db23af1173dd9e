#!/usr/bin/env bash
# Makes the virtual environment .venv and installs ipu_lean into it, the CPU build of torch first
# (a plain `pip install torch` brings CUDA along, some gigabytes).
#
# Usage: scripts/setup.sh [EXTRAS]      for example: scripts/setup.sh test,corpora
# PYTHON: the Python to use (python3); VENV: where the environment is made (.venv).
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-}
venv=${VENV:-.venv}
index=https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
python=$venv/bin/python

torch=$("$python" - <<'PY'
import sys
if sys.version_info < (3, 8):
    sys.exit("ipu_lean needs Python 3.8 or newer; set PYTHON to one")
print({(3, 8): "2.4.1", (3, 9): "2.8.0"}.get(sys.version_info[:2], "2.13.0"))
PY
)
have=$("$python" -c "from importlib.metadata import version; print(version('torch'))" 2>/dev/null || true)
if [ "${have%%+*}" != "$torch" ]; then
    echo "installing torch $torch (CPU build) into $venv"
    # An index that cannot be reached is passed over after ten seconds, and torch comes from the usual one.
    "$python" -m pip install -q --retries 0 --timeout 10 --extra-index-url "$index" "torch==$torch"
fi
echo "installing ipu_lean${extras:+ with $extras} into $venv"
"$python" -m pip install -q -e ".${extras:+[$extras]}"
