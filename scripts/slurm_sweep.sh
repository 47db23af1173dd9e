#!/usr/bin/env bash
# A sweep as a Slurm job array: each task runs a share of the trials into one shared directory, and a last job judges them.
#
#   scripts/slurm_sweep.sh TASKS DIR CONFIG [key.path=value ...] [--widths ... --lrs ... --seeds ...]
#   scripts/slurm_sweep.sh TASKS DIR [--lrs ...]                  # goes on with the sweep in DIR (and makes it larger)
#
# DIR must be seen by all nodes under the same path, and so must the text. What a task has finished stays when it is killed; the last
# job runs what is missing, whatever became of the tasks before it.
#   SBATCH_OPTIONS     for every job, such as "--partition=cpu --cpus-per-task=4 --time=2:00:00" (workers = CPUs of a task)
#   PYTHON             python3
#   DRY_RUN=1          print the commands instead of submitting them
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,5p' "$0"
    exit 2
fi
tasks=$1 directory=$2
shift 2
case $tasks in
    '' | 0* | *[!0-9]*)
        echo "slurm_sweep.sh: TASKS must be a whole number from 1, and is '$tasks'; then come DIR and CONFIG" >&2
        exit 2
        ;;
esac
python=${PYTHON:-python3}
read -r -a options <<<"${SBATCH_OPTIONS:-}"
sweep="$python -m ipu_lean sweep"

say() {
    if [ -n "${DRY_RUN:-}" ]; then
        printf '%q ' "$@" >&2
        echo >&2
        echo 0
    else
        "$@"
    fi
}

case ${1:-} in
    '') ;;
    -* | *=*) say $sweep "$directory" "$@" --plan >/dev/null ;;
    *) say $sweep "$@" --out "$directory" --plan >/dev/null ;;
esac
quoted=$(printf '%q' "$directory")
workers='--workers ${SLURM_CPUS_PER_TASK:-1}'
job=$(say sbatch --parsable --job-name=sweep --array="0-$((tasks - 1))" "${options[@]+"${options[@]}"}" \
    --wrap "$sweep $quoted $workers --share \$SLURM_ARRAY_TASK_ID/$tasks")
say sbatch --parsable --job-name=sweep-judge --dependency="afterany:${job%%;*}" "${options[@]+"${options[@]}"}" \
    --wrap "$sweep $quoted $workers" >/dev/null
echo "array job $job runs $tasks shares of the trials in $directory; the job after it judges them" >&2
