#!/usr/bin/env bash
# Installs what tests/slurm needs, on Debian and Ubuntu and as root: Slurm and munge. Starts nothing.
set -euo pipefail
if command -v slurmctld && command -v slurmd && command -v sbatch && command -v munged; then exit 0; fi >/dev/null
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -y -q --no-install-recommends slurm-wlm munge
