#!/usr/bin/env bash
# A workload on a GKE cluster that xpk made.
#
#   experiments/launch/xpk.sh --name=k3 --cluster=C --project=P --zone=Z \
#     --type=v5p-128 --image=IMAGE -- --config=... --workdir=...
#
# --name=NAME        required: of the workload
# --cluster=NAME, --project=ID, --zone=ZONE, --type=TYPE     required
# --image=IMAGE      required: a container with this project installed, and its
#                    checkout as the working directory
# --slices=N         more than 1: multislice
# --restarts=N       how often the workload may start again after a failure
# --python=PATH      in the container
# --dry-run          print what would run
#
# --workdir must be on a storage that the cluster attaches to its pods.
set -euo pipefail
# shellcheck source=experiments/launch/common.sh
. "$(dirname "$0")/common.sh"
name='' cluster='' project='' zone='' type='' image='' slices=1 restarts=10
python=python
parse "name cluster project zone type image" "slices restarts python" "$@"
counts slices restarts

run xpk workload create "--workload=$name" "--cluster=$cluster" "--project=$project" \
  "--zone=$zone" "--tpu-type=$type" "--num-slices=$slices" "--docker-image=$image" \
  "--max-restarts=$restarts" "--command=$(train_command "$python")"
