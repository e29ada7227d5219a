# shellcheck shell=bash
# Sourced by the templates beside it, which set what it reads: how a job starts its nodes, and what it does with a
# signal. Runs in the batch script, on the first node of the job, outside of any container.

: "${MEGARL_ROOT:?is not set: source job.sh from one of the templates}"
# Of launch/train.py: stopped on request, with a checkpoint; a config that cannot run.
EXIT_PREEMPTED=75 EXIT_BAD_CONFIG=2

# Ends the batch script where a setting that counts something is no number; a comparison would be false for ever.
megarl_check_numbers() {
    local name
    for name in "$@"; do
        case "${!name}" in
        '' | *[!0-9]*)
            echo "$name is '${!name}', which is no whole number: set it, or leave it out" >&2
            exit "$EXIT_BAD_CONFIG"
            ;;
        esac
    done
}

# "address:port" at which the ranks of this job find one another. Fails where nobody knows the address.
megarl_rendezvous() {
    local first address=${MASTER_ADDR:-}
    if [ -z "$address" ]; then
        first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
        # The address that Slurm itself uses. The node's name need not be known to the resolver of a container.
        address=$(scontrol show node "$first" | grep -o 'NodeAddr=[^ ]*' | cut -d = -f 2)
        address=${address:-$first}
    fi
    case "$address" in
    '')
        echo "scontrol does not say which node of $SLURM_JOB_NODELIST is the first: set MASTER_ADDR to its address" >&2
        return 1
        ;;
    *:*) address="[$address]" ;; # IPv6
    esac
    # The port follows from the job: jobs that share a node do not meet.
    echo "$address:${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
}

# Sets MEGARL_STEP: the command that runs PROGRAM [argument …] under one torchrun on each node of the job.
megarl_step() {
    megarl_check_numbers RANKS_PER_NODE STOP_TIMEOUT_S
    # --kill-on-bad-exit=0 --wait: when one node's torchrun ends, the others have a minute to say what they know. Killed
    # at once they would turn a stop on request into a failure.
    # --cpu-bind=none: every rank may use all cores of the job; torchrun's children would share one otherwise.
    MEGARL_STEP=(srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1)
    MEGARL_STEP+=(--cpu-bind=none --kill-on-bad-exit=0 --wait=60 --input=none)
    # Since Slurm 22.05, srun does not take --cpus-per-task from the job: a node's ranks would share one core.
    if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then MEGARL_STEP+=(--cpus-per-task="$SLURM_CPUS_PER_TASK"); fi
    if [ -n "${CONTAINER_IMAGE:-}" ]; then
        # Options of pyxis (srun runs enroot). The checkout and the submit folder have the same paths inside.
        local mounts="$MEGARL_ROOT:$MEGARL_ROOT,$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR"
        MEGARL_STEP+=(--container-image="$CONTAINER_IMAGE")
        MEGARL_STEP+=(--container-mounts="$mounts${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
    fi
    MEGARL_STEP+=(bash "$MEGARL_ROOT/launch/slurm/node.sh" "$@")
    RENDEZVOUS=$(megarl_rendezvous)
    export RENDEZVOUS MEGARL_ROOT VENV RANKS_PER_NODE STOP_TIMEOUT_S
}

# Runs PROGRAM [argument …] on all nodes, to its end; the status is the highest of all nodes.
megarl_on_nodes() {
    megarl_step "$@"
    "${MEGARL_STEP[@]}"
}

# As megarl_on_nodes, for a run that goes on at its newest checkpoint when it is started again. When a rank or a node's
# torchrun fails, it is, on the same nodes. On SIGUSR1 the ranks save and end, and the job goes back into the queue.
# Ends the batch script.
megarl_run() {
    local step="" status restarts=0 is_signalled=""
    megarl_check_numbers MAX_RESTARTS MAX_REQUEUES
    # The batch script alone gets the signal (`--signal=B:`). srun passes it on to every process of the step; those that
    # are no ranks of megarl do not notice it (megarl/processes/stop_signals.py).
    trap 'is_signalled+=1; kill -USR1 $step 2>/dev/null || true' USR1
    echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"
    megarl_step "$@"
    # There was no step yet that the signal could have been passed on to.
    if [ -n "$is_signalled" ]; then megarl_requeue; fi
    while true; do
        "${MEGARL_STEP[@]}" & # not a function: $! has to be srun
        step=$!
        megarl_wait
        case "$status" in
        0 | "$EXIT_BAD_CONFIG") exit "$status" ;;
        "$EXIT_PREEMPTED") megarl_requeue ;;
        esac
        # A signal that came too early for srun to pass it on, or while a rank was failing.
        if [ -n "$is_signalled" ]; then megarl_requeue; fi
        if [ "$restarts" -ge "$MAX_RESTARTS" ]; then
            echo "the run has failed (status $status) and has been started again $restarts times (MAX_RESTARTS)" >&2
            exit "$status"
        fi
        restarts=$((restarts + 1))
        echo "the run has failed (status $status): it is started again, $restarts of at most $MAX_RESTARTS times" >&2
    done
}

# Sets status to that of the step when it ends.
megarl_wait() {
    local signals_before
    while true; do
        signals_before=$is_signalled
        status=0
        wait "$step" || status=$?
        # Otherwise `wait` has ended because of a signal, and says nothing of the step.
        if [ "$signals_before" = "$is_signalled" ]; then return; fi
    done
}

# Puts the job back into the queue, and does not return.
megarl_requeue() {
    # The job id of one task of an array is that of the array: requeued by it, all other tasks are killed and begin anew.
    local job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}
    job=${job:-$SLURM_JOB_ID}
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "$MAX_REQUEUES" ]; then
        echo "job $job has been requeued $MAX_REQUEUES times (MAX_REQUEUES); submit it again to go on" >&2
        exit "$EXIT_PREEMPTED"
    fi
    echo "job $job stopped on request and goes back into the queue"
    if ! scontrol requeue "$job"; then
        echo "Slurm does not requeue job $job (see above); submit it again to go on" >&2
        exit "$EXIT_PREEMPTED"
    fi
    sleep 60 # Slurm ends this script when it has requeued the job; an exit before would complete the job
    exit "$EXIT_PREEMPTED"
}
