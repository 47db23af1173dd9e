#!/usr/bin/env bash
# A POD256: 256 IPUs, sixteen hosts (INSTANCES for another number).  scripts/pod256.sh CONFIG [key.path=value ...] [--out DIR]
exec bash "$(dirname "$0")/pod.sh" 256 "${INSTANCES:-16}" "$@"
