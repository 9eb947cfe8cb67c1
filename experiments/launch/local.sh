#!/usr/bin/env bash
# One process for each GPU of this machine, all of them one run.
#
#   experiments/launch/local.sh --processes=2 -- --config=... --workdir=...
#
# --processes=N      required; process I gets GPU I
# --module=NAME      the command: experiments.train, experiments.bench, ...
# --port=N           where they meet, free on this machine
# --python=PATH      of the environment
# --dry-run          print what would run
#
# One process with all GPUs needs no launcher. When one process fails, the others are
# ended.
set -euo pipefail
# shellcheck source=experiments/launch/common.sh
. "$(dirname "$0")/common.sh"
processes='' module=experiments.train port=8476 python=python
parse processes "module port python" "$@"
counts processes port

all=()
end_all() {
  [ ${#all[@]} -eq 0 ] || kill "${all[@]}" 2> /dev/null || true
}
trap end_all EXIT
for ((process = 0; process < processes; process++)); do
  command=(env "CUDA_VISIBLE_DEVICES=$process" "$python" -m "$module" "${train[@]}"
    "--config.cluster.coordinator=localhost:$port"
    "--config.cluster.processes=$processes" "--config.cluster.process=$process")
  printf '+ %s\n' "$(quote "${command[@]}")"
  if [ "$dry_run" = no ]; then
    "${command[@]}" &
    all+=($!)
  fi
done
for _ in ${all[@]+"${all[@]}"}; do
  wait -n
done
all=()
