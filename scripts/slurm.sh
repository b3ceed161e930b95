#!/usr/bin/env bash
# Train under Slurm, through any number of preemptions and time limits:
#
#     OUT=runs/resnet50 sbatch scripts/slurm.sh --model resnet50 --data-path /path/to/imagenet
#
# Slurm's warning comes 300 s before the time limit; every rank then stops after the same step and saves, and the job is
# requeued. One that failed is not, for it would fail again, nor one that was cancelled. Run it from the repository's folder.
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
START_S=120 # that Python may take to start, its imports included

status() {
    cat "$OUT/status.json" 2>/dev/null
}

# An earlier job's end is not this one's.
before=$(status)

says() {
    [ "$(status)" != "$before" ] &&
        status | python3 -c 'import json, sys; sys.exit(json.load(sys.stdin)[sys.argv[1]] != json.loads(sys.argv[2]))' "$@" 2>/dev/null
}

# The warning comes to this shell alone (B:). Of a SIGTERM to srun itself every rank would be killed, and of one while it
# starts torchrun would die: so the step is told, once train.py has written that it runs.
stop() {
    for ((second = 0; second < START_S; second++)); do
        [ "$(status)" = "$before" ] && kill -0 "$child" 2>/dev/null || break
        sleep 1
    done
    scancel --signal=TERM "$SLURM_JOB_ID"
}
trap stop USR1
# Slurm sends it to the step, too, and here it must not end the shell before the ranks have saved.
trap : TERM
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240
srun --kill-on-bad-exit=1 torchrun --nnodes="${SLURM_NNODES:-1}" --nproc_per_node="${GPUS:-8}" --rdzv-backend=c10d \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$(hostname):$((10000 + SLURM_JOB_ID % 20000))" \
    train.py --output-dir "$OUT" --resume auto "$@" &
child=$!
# wait returns when a trap has run, too.
while kill -0 "$child" 2>/dev/null; do wait "$child"; done
wait "$child"
code=$?
# A signal to the job may still come, and must not end the commands below: a child inherits this, but no handler.
trap '' USR1 TERM

must_requeue() {
    # A busy Slurm may not answer, and says SIGNALING for a moment of a job that runs, until its signal has arrived.
    for ((attempt = 0; attempt < 10; attempt++)); do
        job=$(scontrol --oneliner show job "$SLURM_JOB_ID") && [[ $job != *" JobState=SIGNALING "* ]] && break
        sleep 1
    done
    # Slurm ends a job that is cancelled, and requeues one that it preempts, by itself: then it runs no longer.
    case $job in
    *" JobState=RUNNING "* | *" JobState=SIGNALING "* | *" Reason=TimeLimit "*) ;;
    *) return 1 ;;
    esac
    says requeue true && return
    # With a GraceTime it leaves the rest to this script, also where torchrun died before train.py could write anything.
    [ "$(status)" = "$before" ] && [[ $job == *" PreemptTime="[0-9]* ]]
}

if says state '"finished"'; then exit 0; fi
if must_requeue; then scontrol requeue "$SLURM_JOB_ID" && exit 0; fi
echo "slurm.sh: not queued again: exit code $code; $(grep -o '\(JobState\|Reason\|PreemptTime\)=[^ ]*' <<<"$job" | tr '\n' ' ')" >&2
exit $((code ? code : 1))
