#!/usr/bin/env bash
# Installs the Slurm that tests/features/cluster starts: Debian's, of which nothing is started as a service.
set -euo pipefail
command -v slurmctld slurmd sbatch > /dev/null && exit 0
apt-get update --quiet --quiet
apt-get install --yes --quiet --no-install-recommends slurm-wlm
