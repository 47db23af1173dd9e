#!/usr/bin/env bash
# A POD16: 16 IPUs, one host.  scripts/pod16.sh CONFIG [key.path=value ...] [--out DIR]
exec bash "$(dirname "$0")/pod.sh" 16 1 "$@"
