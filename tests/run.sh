#!/usr/bin/env bash
# Makes or reuses .venv, installs what is needed, and runs the tests. Further arguments go to pytest:
#   bash tests/run.sh                       all tests
#   bash tests/run.sh tests/config -x       some of them
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh
# One thread a process: the models are tiny, and threads that share a core wait for one another at every operation.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONFAULTHANDLER=1
exec python -m pytest "$@"
