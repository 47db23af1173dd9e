#!/usr/bin/env bash
# A POD64: 64 IPUs, four hosts (INSTANCES for another number).  scripts/pod64.sh CONFIG [key.path=value ...] [--out DIR]
exec bash "$(dirname "$0")/pod.sh" 64 "${INSTANCES:-4}" "$@"
