#!/usr/bin/env bash
# TPU VMs by queued resources: ask for them, install this checkout, start the run.
#
#   experiments/launch/tpu_vm.sh --name=k3 --project=P --zone=Z --type=v5p-128 \
#     --runtime=v2-alpha-tpuv5 -- --config=... --workdir=...
#
# --name=NAME        required: of the queued resource
# --project=ID, --zone=ZONE, --type=TYPE, --runtime=VERSION     required
# --slices=N         more than 1: multislice
# --spot=yes         capacity that may be taken away
# --create=no        the resource is there and ready: install and start only
# --poll=SECONDS     between looks at a resource that is not ready yet
# --dry-run          print what would run
#
# --workdir must be on a file system that all hosts mount. The committed files of the
# checkout are copied to every host. Spot hosts that were taken away do not come back:
# delete the resource and run the same command again.
set -euo pipefail
# shellcheck source=experiments/launch/common.sh
. "$(dirname "$0")/common.sh"
name='' project='' zone='' type='' runtime='' slices=1 spot=no create=yes poll=60
parse "name project zone type runtime" "slices spot create poll" "$@"
counts slices poll
switches spot create

resources=(gcloud compute tpus queued-resources)
on_hosts=(gcloud alpha compute tpus queued-resources)
where=("--project=$project" "--zone=$zone")
nodes=("--node-id=$name")
[ "$slices" = 1 ] || nodes=("--node-count=$slices" "--node-prefix=$name")
[ "$spot" = no ] || nodes+=(--spot)

if [ "$create" = yes ]; then
  run "${resources[@]}" create "$name" "${where[@]}" "--accelerator-type=$type" \
    "--runtime-version=$runtime" "${nodes[@]}"
fi

state=("${resources[@]}" describe "$name" "${where[@]}" '--format=value(state.state)')
printf '# every %s s, until it prints ACTIVE:\n+ %s\n' "$poll" "$(quote "${state[@]}")"
if [ "$dry_run" = no ]; then
  until now=$("${state[@]}") && [ "$now" = ACTIVE ]; do
    case $now in
      FAILED | SUSPENDING | SUSPENDED)
        fail "$name is $now; delete it (${resources[*]} delete $name) and ask again"
        ;;
    esac
    printf '%s is %s\n' "$name" "$now"
    sleep "$poll"
  done
fi

archive=$(mktemp -u).tar.gz
trap 'rm -f "$archive"' EXIT
run git archive --format=tar.gz "--output=$archive" HEAD
everywhere=("${where[@]}" --node=all --worker=all)
run "${on_hosts[@]}" scp "$archive" "$name:kimi_jax.tar.gz" "${everywhere[@]}"

install="set -e; mkdir -p kimi_jax; tar -xzf kimi_jax.tar.gz -C kimi_jax; cd kimi_jax; \
python3 -m pip install --quiet --user uv; python3 -m uv venv --quiet --allow-existing \
--python=3.12 .venv; python3 -m uv pip install --quiet --python=.venv/bin/python \
-e '.[tpu,data]'"
run "${on_hosts[@]}" ssh "$name" "${everywhere[@]}" "--command=$install"

# The run goes on when this connection ends.
start="cd kimi_jax || exit 1; nohup $(train_command .venv/bin/python) >> train.log 2>&1 \
< /dev/null &"
run "${on_hosts[@]}" ssh "$name" "${everywhere[@]}" "--command=$start"
printf '# watch it:\n#   %s\n' "$(quote "${on_hosts[@]}" ssh "$name" "${where[@]}" \
  --node=0 --worker=0 '--command=tail -f kimi_jax/train.log')"
printf '# end it, and pay no longer:\n#   %s\n' \
  "$(quote "${resources[@]}" delete "$name" "${where[@]}" --force)"
