#!/usr/bin/env bash
# Train under Slurm, through any number of preemptions and time limits:
#
#     OUT=runs/resnet50 sbatch scripts/slurm.sh --model resnet50 --data-path /path/to/imagenet
#
# Slurm's warning comes 300 s before the time limit: every rank stops after the same step and saves, and this script
# requeues the job, unless it was cancelled, or failed and would fail again. Run it from the repository's folder.
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
START_S=120 # seconds that Python and its imports may take to start

status() {
    cat "$OUT/status.json" 2>/dev/null
}

# The status that an earlier job left, which is not this one's.
before=$(status)

says() {
    [ "$(status)" != "$before" ] &&
        status | python3 -c 'import json, sys; sys.exit(json.load(sys.stdin)[sys.argv[1]] != json.loads(sys.argv[2]))' "$@" 2>/dev/null
}

# The warning comes to this shell alone (B:). A SIGTERM to srun would kill every rank, and one to the step would kill
# torchrun while it starts: so the step gets its SIGTERM once train.py has written that it runs.
stop() {
    for ((second = 0; second < START_S; second++)); do
        [ "$(status)" = "$before" ] && kill -0 "$child" 2>/dev/null || break
        sleep 1
    done
    scancel --signal=TERM "$SLURM_JOB_ID"
}
trap stop USR1
# Slurm may send SIGTERM to this shell too, which must not end before the ranks have saved.
trap : TERM
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240
# Before a long run, look for a sick GPU or link, on every node of the job:
#   srun --ntasks-per-node=1 dcgmi diag -r 2    # minutes; NVIDIA's DCGM
#   srun --ntasks-per-node=8 all_reduce_perf -b 8 -e 1G -f 2 -g 1    # nccl-tests built with MPI=1: GB/s as you know them?
# To learn which collective a hang is in (docs/launching.md, "When it hangs"):
#   export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1
# Since Slurm 22.05 srun does not take the job's --cpus-per-task by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
srun --kill-on-bad-exit=1 torchrun --nnodes="${SLURM_NNODES:-1}" --nproc_per_node="${GPUS:-${SLURM_GPUS_ON_NODE:-8}}" --rdzv-backend=c10d \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$(hostname):$((10000 + SLURM_JOB_ID % 20000))" \
    train.py --output-dir "$OUT" --resume auto "$@" &
child=$!
# wait returns when a trap has run, too.
while kill -0 "$child" 2>/dev/null; do wait "$child"; done
wait "$child"
code=$?
# A late signal to the job must not end the commands below: a child inherits an ignored signal, but no handler.
trap '' USR1 TERM

must_requeue() {
    # A busy Slurm may not answer; and a running job is SIGNALING for a moment, until its signal has arrived.
    for ((attempt = 0; attempt < 10; attempt++)); do
        job=$(scontrol --oneliner show job "$SLURM_JOB_ID") && [[ $job != *" JobState=SIGNALING "* ]] && break
        sleep 1
    done
    # Slurm itself ends a cancelled job and requeues a preempted one: then the job runs no longer.
    case $job in
    *" JobState=RUNNING "* | *" JobState=SIGNALING "* | *" Reason=TimeLimit "*) ;;
    *) return 1 ;;
    esac
    says requeue true && return
    # With a GraceTime Slurm leaves the requeue to this script, even if torchrun died before train.py wrote anything.
    [ "$(status)" = "$before" ] && [[ $job == *" PreemptTime="[0-9]* ]]
}

if says state '"finished"' || says state '"stopped"'; then exit 0; fi
if must_requeue; then scontrol requeue "$SLURM_JOB_ID" && exit 0; fi
echo "slurm.sh: not queued again: exit code $code; $(grep -o '\(JobState\|Reason\|PreemptTime\)=[^ ]*' <<<"$job" | tr '\n' ' ')" >&2
exit $((code ? code : 1))
