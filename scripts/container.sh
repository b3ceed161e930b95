#!/usr/bin/env bash
# Train in a container or a cloud's job, through any number of preemptions:
#
#     OUT=/runs/resnet50 PET_NPROC_PER_NODE=8 scripts/container.sh --model resnet50 --data-path /data/imagenet
#
# torchrun takes its own options from variables PET_*: PET_NNODES, PET_MAX_RESTARTS, PET_RDZV_BACKEND and others.
# A run that was stopped and has saved ends train.py with exit code 0 on the nodes that were not told to stop, and whoever
# restarts only what failed would start half of the nodes: so the exit code is 0 only if the run is finished.
set -u
OUT=${OUT:?set OUT to the output folder, such as OUT=/runs/resnet50}
export PET_NPROC_PER_NODE=${PET_NPROC_PER_NODE:-gpu}
# Seconds that a save may take; grant more before SIGKILL (terminationGracePeriodSeconds, docker stop --time).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240}
# By default the torchrun of a node that is lost and replaced waits for an address that nobody sets (torch 2.14).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
cd "$(dirname "$0")/.." || exit 1

torchrun train.py --output-dir "$OUT" --resume auto "$@" &
child=$!
# The container's first process is this shell, and whoever ends the container tells it alone.
trap 'kill -TERM "$child"' TERM INT
# wait returns when a trap has run, too.
while kill -0 "$child" 2>/dev/null; do wait "$child"; done
wait "$child"
code=$?
grep -q '"state": "finished"' "$OUT/status.json" 2>/dev/null || exit $((code ? code : 1))
exit "$code"
