#!/usr/bin/env bash
# The road of alignment in small: SFT, a reward model, and PPO with a critic, on a tiny model.
#   bash launch/pipeline.sh [--output DIR] [--seed N] [--ranks N] [--steps N]
# Makes or reuses .venv (shared with tests/run.sh), then hands over to launch/pipeline.py, which says what it does.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/setup.sh
exec python launch/pipeline.py "$@"
