#!/usr/bin/env bash
# From a fresh clone to a trained model: installs ipu_lean into .venv and trains configs/quickstart.yaml on the CPU.
# More arguments are passed on: scripts/quickstart.sh train.steps=100 --out runs/short
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh corpora
# Threads that wait for each other sleep instead of spinning: on a machine that is busy otherwise this is ten times as fast.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
"${VENV:-.venv}/bin/ipu-lean" train configs/quickstart.yaml "$@"
