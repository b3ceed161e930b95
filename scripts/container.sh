#!/usr/bin/env bash
# Train in a container or a cloud's job, through any number of preemptions:
#
#     OUT=/runs/resnet50 PET_NPROC_PER_NODE=8 scripts/container.sh --model resnet50 --data-path /data/imagenet
#
# torchrun takes its own options from variables PET_*: PET_NNODES, PET_MAX_RESTARTS, PET_RDZV_BACKEND and others.
# After a preemption train.py saves, and exits with code 0 on the nodes that got no signal themselves. A cluster that
# restarts only failed nodes would then start half of them: so this script exits with 0 only if the run is finished,
# or was stopped by --stop-epoch. It exits with 2 if the start was refused, and would be again.
set -u
OUT=${OUT:?set OUT to the output folder, such as OUT=/runs/resnet50}
trap 'exit 1' TERM INT # nothing to save yet
if [ -z "${PET_NPROC_PER_NODE:-}" ]; then
    PET_NPROC_PER_NODE=1 # torchrun ends in a traceback if it is told `gpu` where there is none
    python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' && PET_NPROC_PER_NODE=gpu
fi
export PET_NPROC_PER_NODE
# Seconds that a save may take; grant more before SIGKILL (terminationGracePeriodSeconds, docker stop --time).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240}
# Without this, torchrun on a node that replaces a lost one waits for an address that nobody sets (torch 2.14).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
cd "$(dirname "$0")/.." || exit 1
# torchrun makes 1 of every exit code, so train.py writes a refusal here: to a new file, of this start alone.
TOUCHSTONE_REFUSAL_FILE=$(mktemp)
export TOUCHSTONE_REFUSAL_FILE
trap 'rm -f "$TOUCHSTONE_REFUSAL_FILE"' EXIT

torchrun train.py --output-dir "$OUT" --resume auto "$@" &
child=$!
# This shell is the container's first process, the only one that a stop of the container signals.
trap 'kill -TERM "$child"' TERM INT
# wait returns when a trap has run, too.
while kill -0 "$child" 2>/dev/null; do wait "$child"; done
wait "$child"
code=$?
[ "$code" -ne 0 ] && [ -s "$TOUCHSTONE_REFUSAL_FILE" ] && exit 2
grep -q '"state": "\(finished\|stopped\)"' "$OUT/status.json" 2>/dev/null || exit $((code ? code : 1))
exit "$code"
