#!/usr/bin/env bash
# A Slurm job with one process a node, which uses all GPUs of it.
#
#   experiments/launch/slurm.sh --nodes=4 --gpus=8 -- --config=... --workdir=...
#
# --nodes=N          required
# --gpus=N           on each node; empty: none are asked for
# --time=TIME        limit of the job, as Slurm writes it
# --grace=SECONDS    before that limit the run is told to save (exit code 143)
# --partition=NAME, --account=NAME, --qos=NAME     where needed
# --name=NAME        of the job
# --python=PATH      of the environment, the same on all nodes
# --dry-run          print what would run
#
# Submit from the checkout; it and --workdir must be on a file system that all nodes
# share. A preempted job is queued again and resumes.
set -euo pipefail
# shellcheck source=experiments/launch/common.sh
. "$(dirname "$0")/common.sh"
nodes='' gpus='' time=24:00:00 grace=300 partition='' account='' qos=''
name=kimi_jax python=python
parse nodes "gpus time grace partition account qos name python" "$@"
counts nodes grace

script="#!/bin/bash
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=$time
#SBATCH --signal=TERM@$grace
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log"
ask() {
  [ -z "$2" ] || script+=$'\n'"#SBATCH --$1=$2"
}
ask gpus-per-node "$gpus"
ask partition "$partition"
ask account "$account"
ask qos "$qos"
script+="
set -euo pipefail
srun --kill-on-bad-exit=1 --label $(train_command "$python")"

feed "$script" sbatch
