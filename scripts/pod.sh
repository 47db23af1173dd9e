#!/usr/bin/env bash
# Trains on a POD of IPUs: works out how many replicas fill it, and starts one process on each host.
#
#   scripts/pod.sh IPUS HOSTS CONFIG [key.path=value ...] [--out DIR]
#
# One host is an ordinary process; several are started by Graphcore's poprun, which needs
#   HOSTS_LIST         their names, comma-separated (the first is this one)
#   VIPU_PARTITION     name of the partition of IPUS IPUs (IPUOF_VIPU_API_PARTITION_ID unless given)
#   VIPU_SERVER        host of the V-IPU controller (IPUOF_VIPU_API_HOST unless given)
# and may use
#   EXECUTABLE_CACHE   a directory that all hosts see (ipu.executable_cache of the configuration unless given)
#   PYTHON             python3
#   DRY_RUN=1          print the command instead of running it
# The batch of the configuration is kept: more replicas mean less accumulation, never below what the pipeline needs.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 3 ]; then
    sed -n '2,5p' "$0"
    exit 2
fi
ipus=$1 hosts=$2 config=$3
shift 3
python=${PYTHON:-python3}

overrides=() options=()
while [ $# -gt 0 ]; do
    case $1 in
    *=*) overrides+=("$1") ;;
    *) options+=("$1") ;;
    esac
    shift
done

plan=$("$python" -m ipu_lean.ipu.pod "$ipus" "$config" device=ipu "${overrides[@]+"${overrides[@]}"}")
read -r replicas accumulation per_replica cache <<<"$plan"
echo "$ipus IPUs: $replicas replicas of $per_replica, accumulation $accumulation"
command=("$python" -m ipu_lean train "$config" device=ipu "${overrides[@]+"${overrides[@]}"}"
    "batch.replicas=$replicas" "batch.accumulation=$accumulation" "${options[@]+"${options[@]}"}")

if [ "$hosts" -gt 1 ]; then
    cache=${EXECUTABLE_CACHE:-$cache}
    partition=${VIPU_PARTITION:-${IPUOF_VIPU_API_PARTITION_ID:?name the partition in VIPU_PARTITION}}
    server=${VIPU_SERVER:-${IPUOF_VIPU_API_HOST:?name the V-IPU host in VIPU_SERVER}}
    launcher=(poprun --num-instances "$hosts" --num-replicas "$replicas" --ipus-per-replica "$per_replica"
        --host "${HOSTS_LIST:?name the hosts in HOSTS_LIST}" --vipu-partition "$partition" --vipu-server-host "$server")
    if [ "$cache" != - ]; then
        launcher+=(--executable-cache-path "$cache")
    fi
    command=("${launcher[@]}" "${command[@]}")
fi
if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${command[*]}"
else
    exec "${command[@]}"
fi
