#!/usr/bin/env bash
# A JobSet on a GKE cluster with TPUs: one Job a slice, one pod a host.
#
#   experiments/launch/jobset.sh --name=k3 --accelerator=tpu-v5p-slice \
#     --topology=4x4x8 --hosts=32 --image=IMAGE --claim=VOLUME \
#     -- --config=... --workdir=/mnt/runs/k3
#
# --name=NAME        required: of the JobSet
# --accelerator=LABEL, --topology=AxBxC      required: labels of the node pools
# --hosts=N          required: hosts of a slice
# --image=IMAGE      required: a container with this project installed, and its
#                    checkout as the working directory
# --claim=NAME       required: a volume claim that many pods may write; it is mounted
#                    at /mnt/runs, where --workdir should be
# --chips=N          of a host
# --slices=N         more than 1: multislice; one node pool for each
# --restarts=N       how often all of it may start again after a failure
# --grace=SECONDS    to save after SIGTERM
# --python=PATH      in the container
# --dry-run          print what would run
set -euo pipefail
# shellcheck source=experiments/launch/common.sh
. "$(dirname "$0")/common.sh"
name='' accelerator='' topology='' hosts='' image='' claim='' chips=4 slices=1
restarts=10 grace=300 python=python
parse "name accelerator topology hosts image claim" \
  "chips slices restarts grace python" "$@"
counts hosts chips slices restarts grace

command="[$(json "$python"), \"-m\", \"experiments.train\""
for word in "${train[@]}"; do
  # Kubernetes would take $(NAME) for a variable.
  command+=", $(json "${word//\$/\$\$}")"
done
command+="]"

manifest="apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $(json "$name")
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: $restarts
  replicatedJobs:
  - name: slice
    replicas: $slices
    template:
      spec:
        completionMode: Indexed
        parallelism: $hosts
        completions: $hosts
        backoffLimit: 0
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: $grace
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: $(json "$accelerator")
              cloud.google.com/gke-tpu-topology: $(json "$topology")
            containers:
            - name: train
              image: $(json "$image")
              command: $command
              ports:
              - containerPort: 8471
              - containerPort: 8080
              - containerPort: 8482
              resources:
                limits:
                  google.com/tpu: $chips
              volumeMounts:
              - name: runs
                mountPath: /mnt/runs
            volumes:
            - name: runs
              persistentVolumeClaim:
                claimName: $(json "$claim")"

feed "$manifest" kubectl apply -f -
