#!/usr/bin/env bash
# Train under Slurm, through any number of preemptions and time limits:
#
#     OUT=runs/resnet50 sbatch scripts/slurm.sh --model resnet50 --data-path /path/to/imagenet
#
# Slurm's signal comes 300 s before the end; every rank then stops after the same step and saves, and the job is
# requeued. Only a preempted run is: one that failed would fail again. Run it from the repository's folder.
#SBATCH --job-name=touchstone
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -u
OUT=${OUT:?set OUT to the output folder, such as OUT=runs/resnet50}

status() {
    cat "$OUT/status.json" 2>/dev/null
}

# An earlier job's end is not this one's.
before=$(status)

says() {
    [ "$(status)" != "$before" ] &&
        status | python3 -c 'import json, sys; sys.exit(json.load(sys.stdin)[sys.argv[1]] != json.loads(sys.argv[2]))' "$@" 2>/dev/null
}

# The signal goes to this shell alone (B:). torchrun passes SIGTERM on to every rank; of SIGUSR1 it would die.
trap 'kill -TERM "$child" 2>/dev/null' USR1 TERM
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240
srun --kill-on-bad-exit=1 torchrun --nnodes="${SLURM_NNODES:-1}" --nproc_per_node="${GPUS:-8}" --rdzv-backend=c10d \
    --rdzv-endpoint="$(hostname):29500" \
    train.py --output-dir "$OUT" --resume auto "$@" &
child=$!
code=0
# wait returns when the trap has run, too.
while true; do
    wait "$child"
    code=$?
    kill -0 "$child" 2>/dev/null || break
done

if says state '"finished"'; then exit 0; fi
if says requeue true; then scontrol requeue "$SLURM_JOB_ID" && exit 0; fi
exit $((code ? code : 1))
