#!/usr/bin/env bash
# Runs once on each node of a job, inside the container if there is one: torchrun starts this node's ranks of
#   node.sh PROGRAM [argument …]
# Everything it needs comes by environment from job.sh. Whatever is set here may be set before, e.g. in the shell that
# submits: sbatch and srun hand the environment on.
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
# In a container, megarl may be installed in the image.
# shellcheck disable=SC1091
if [ -f "$VENV/bin/activate" ]; then . "$VENV/bin/activate"; fi
if ! python -c "import megarl"; then
    echo "node $(hostname): megarl is not in $(command -v python || echo "any Python of PATH"): set VENV to an environment" \
        "that has it (now: $VENV)" >&2
    exit 2 # as a config that cannot run: no restart helps
fi

# --- limits. Slurm hands on those of the shell that submitted (PropagateResourceLimits), which are a login node's.
# Locked memory: InfiniBand registers its buffers there, and NCCL fails with "ibv_reg_mr failed" where it may not.
# The highest that the node allows; if that is not "unlimited", the administrator has to raise it for slurmd.
ulimit -l "$(ulimit -Hl)"
# Open files: each rank has sockets to many others, files of checkpoints and data, and pipes to its reward workers.
ulimit -n "$(ulimit -Hn)"
# No core files: one of a rank is as large as its memory.
ulimit -c 0

# --- NCCL and gloo
# One line for what is wrong. INFO, for one run, shows the rings, transports and devices that NCCL chose.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# Which network. Left alone, NCCL and gloo take the first interface that looks good: on nodes with several, or with a
# container bridge (docker0), ranks then wait for one another until they time out. Name the one that all nodes share:
#   export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5
# Collectives that fail, or wait too long, end the rank instead of letting it hang.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"

# --- threads: ranks share the node's cores; left alone, each would start as many threads as there are cores.
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    OMP_NUM_THREADS=$(($(nproc) / RANKS_PER_NODE))
    if [ "$OMP_NUM_THREADS" -lt 1 ]; then OMP_NUM_THREADS=1; fi
    export OMP_NUM_THREADS
fi
export TOKENIZERS_PARALLELISM=false

# The first node hosts the rendezvous. It is told so: torchrun would look for the address among those of the machine,
# which fails where NodeAddr is of another network, and then nobody hosts it.
if [ "$SLURM_NODEID" = 0 ]; then is_host=1; else is_host=0; fi
# --max-restarts=0: on several nodes, torchrun (2.13) counts restarts on each node for itself, and ranks that were told
# different numbers look for one another in different places, for ever. job.sh starts them again.
exec python "$MEGARL_ROOT/launch/slurm/agent.py" \
    --nnodes="$SLURM_NNODES" --nproc-per-node="$RANKS_PER_NODE" --max-restarts=0 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$RENDEZVOUS" --rdzv-conf="is_host=$is_host" \
    ${LOCAL_ADDR:+--local-addr="$LOCAL_ADDR"} --shutdown-timeout="$STOP_TIMEOUT_S" "$@"
