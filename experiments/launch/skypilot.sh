#!/usr/bin/env bash
# A managed SkyPilot job on machines with GPUs; it resumes where they are taken away.
#
#   experiments/launch/skypilot.sh --name=k3 --gpus=H200:8 --nodes=2 \
#     --bucket=s3://BUCKET -- --config=... --workdir=/mnt/runs/k3
#
# --name=NAME        required: of the job
# --gpus=KIND:N      required: of each node
# --bucket=URL       required: storage that is mounted at /mnt/runs, where --workdir
#                    should be
# --nodes=N
# --infra=WHERE      a cloud, region or cluster; empty: the cheapest
# --spot=yes         capacity that may be taken away
# --port=N           for the processes to find each other
# --dry-run          print what would run
set -euo pipefail
# shellcheck source=experiments/launch/common.sh
. "$(dirname "$0")/common.sh"
name='' gpus='' bucket='' nodes=1 infra='' spot=no port=8476
parse "name gpus bucket" "nodes infra spot port" "$@"
counts nodes port
switches spot

command=$(train_command .venv/bin/python)
# shellcheck disable=SC2016 # The node expands them.
command+=' \
    --config.cluster.coordinator="$(head -n1 <<< "$SKYPILOT_NODE_IPS"):'$port'" \
    --config.cluster.processes="$SKYPILOT_NUM_NODES" \
    --config.cluster.process="$SKYPILOT_NODE_RANK"'

task="name: $(json "$name")
num_nodes: $nodes
workdir: .
resources:
  accelerators: $(json "$gpus")
  use_spot: $([ "$spot" = yes ] && echo true || echo false)"
[ -z "$infra" ] || task+="
  infra: $(json "$infra")"
task+="
file_mounts:
  /mnt/runs:
    source: $(json "$bucket")
    mode: MOUNT
setup: |
  set -e
  python3 -m pip install --quiet uv
  python3 -m uv venv --quiet --allow-existing --python=3.12 .venv
  python3 -m uv pip install --quiet --python=.venv/bin/python -e '.[gpu,data]'
run: |
  set -e
  exec $command"

file=$(mktemp)
trap 'rm -f "$file"' EXIT
feed "$task" tee "$file"
run sky jobs launch --yes "--name=$name" "$file"
