#!/usr/bin/env bash
# The main job on a fresh machine: a real model learns a task by GRPO, from nothing but a clone.
#   bash launch/quickstart.sh [--output DIR] [--seed N] [--ranks N] [--tiny] [--engine sglang]
# Makes or reuses .venv (shared with tests/run.sh), then hands over to launch/quickstart.py, which says what it does.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh
case " $* " in
*" --engine sglang "* | *" --engine=sglang "*) . launch/setup_sglang_cpu.sh ;;
esac
exec python launch/quickstart.py "$@"
