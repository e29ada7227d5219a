#!/usr/bin/env bash
# Installs what tests/slurm needs, on Debian and Ubuntu and as root: Slurm and munge. Starts nothing.
set -euo pipefail
if command -v slurmctld slurmd sbatch munged >/dev/null; then exit 0; fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -y -q --no-install-recommends slurm-wlm munge
