#!/usr/bin/env bash
# From a fresh clone to a trained model: installs ipu_lean into .venv and trains configs/quickstart.yaml on the CPU.
# More arguments are passed on: scripts/quickstart.sh train.steps=100 --out runs/short
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh corpora
"${VENV:-.venv}/bin/ipu-lean" train configs/quickstart.yaml "$@"
