#!/usr/bin/env bash
# Makes or reuses .venv, installs what is needed, and runs the tests. Further arguments go to pytest:
#   bash tests/run.sh                       all tests
#   bash tests/run.sh tests/config -x       some of them
#
#   MEGARL_TEST_WORKERS   how many files run at once (default: 2; 0: in pytest's own process, for a debugger)
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh
. launch/setup_sglang_cpu.sh
# One thread a process: the models are tiny, and threads that share a core wait for one another at every operation.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONFAULTHANDLER=1
# Two files at a time, whole files: most tests of one process wait for one core, and a file's fixtures are expensive.
exec python -m pytest --numprocesses "${MEGARL_TEST_WORKERS:-2}" --dist loadfile "$@"
