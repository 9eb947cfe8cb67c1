"""Launchers are recognised by the environments that they leave."""

import pytest

from kimi_jax import clusters
from kimi_jax.errors import UserError
from tests import tiny

SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "node[007-008,020]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_NTASKS": "99",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
GKE = {"TPU_WORKER_HOSTNAMES": "job-0,job-1,job-2,job-3", "TPU_WORKER_ID": "3"}
SLICES = {
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "first-0:8080",
}
TPU_VM = {
    "agent-worker-number": "1",
    "worker-network-endpoints": "unknown:unknown:10.0.0.2,unknown:unknown:10.0.0.3",
    "tpu-env": "ACCELERATOR_TYPE: 'v5p-16'\nZONE: 'here'\n",
}
TPU_VM_SLICES = "".join(f"{name}: '{value}'\n" for name, value in SLICES.items())


def find(environment, *overrides, metadata=None, gpus=0):
    return clusters.find(
        tiny.make(*(f"cluster.{item}" for item in overrides)).cluster,
        environment,
        metadata=(metadata or {}).get,
        gpus=gpus,
    )


@pytest.mark.parametrize(
    ("environment", "metadata", "expected"),
    [
        (SLURM, {}, ("Slurm job 5000", "node007:62344", 3, 2)),
        (
            {**SLURM, "SLURM_STEP_NODELIST": "a1,b2"},
            {},
            ("Slurm job 5000", "a1:62344", 3, 2),
        ),
        (OPEN_MPI, {}, ("Open MPI", "10.96.0.1:62624", 8, 5)),
        (GKE, {}, ("GKE", "job-0:8482", 4, 3)),
        ({**GKE, **SLICES}, {}, ("GKE, slice 1 of 2", "first-0:8482", 8, 7)),
        ({}, TPU_VM, ("TPU VM", "10.0.0.2:8482", 2, 1)),
        (
            {},
            {**TPU_VM, "worker-network-endpoints": "10.0.0.2,10.0.0.3"},
            ("TPU VM", "10.0.0.2:8482", 2, 1),
        ),
        (
            {},
            {**TPU_VM, "tpu-env": TPU_VM_SLICES},
            ("TPU VM, slice 1 of 2", "first-0:8482", 4, 3),
        ),
    ],
)
def test_launchers(environment, metadata, expected):
    assert find(environment, metadata=metadata)[:4] == expected


@pytest.mark.parametrize(
    ("environment", "metadata", "overrides"),
    [
        ({}, {}, ()),
        # An allocation without srun, one task, one host.
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, {}, ()),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, {}, ()),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, {}, ()),
        ({}, {**TPU_VM, "worker-network-endpoints": "10.0.0.2"}, ()),
        ({"TPU_SKIP_MDS_QUERY": "1"}, TPU_VM, ()),
        (SLURM, {}, ("processes=1",)),
    ],
)
def test_no_cluster(environment, metadata, overrides):
    assert find(environment, *overrides, metadata=metadata) is None


def test_the_config_goes_before_the_environment():
    asked = ("coordinator=a:1", "processes=4", "process=2")
    assert find({}, *asked)[:4] == ("config.cluster", "a:1", 4, 2)
    assert find(SLURM, "coordinator=a:1")[:4] == ("Slurm job 5000", "a:1", 3, 2)


@pytest.mark.parametrize(
    ("environment", "overrides", "words"),
    [
        ({}, ("processes=4",), "add --config.cluster.coordinator=HOST:PORT --conf"),
        ({}, ("coordinator=a:1", "process=0"), "add --config.cluster.processes=NUM"),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
            (),
            "Open MPI does not say .* add --config.cluster.coordinator=HOST:PORT ",
        ),
        (SLURM, ("processes=2",), "process 2 of 2; .* from 0 to 1"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "x"}, (), "SLURM_STEP_NUM_TASKS='x'"),
        ({**GKE, "MEGASCALE_NUM_SLICES": "2"}, (), "MEGASCALE_SLICE_ID is missing"),
        ({**GKE, "TPU_WORKER_ID": ""}, (), "TPU_WORKER_ID='' in the environment"),
    ],
)
def test_half_a_cluster_is_refused(environment, overrides, words):
    with pytest.raises(UserError, match=words):
        find(environment, *overrides)


def test_gpus_are_dealt_out_among_the_processes_of_a_machine():
    here = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1,8(x2)", "SLURM_LOCALID": "3"}
    assert find(SLURM, gpus=8).local_devices is None
    assert find(here, gpus=8).local_devices == (3,)
    assert find(here, gpus=16).local_devices == (6, 7)
    assert find({**here, "CUDA_VISIBLE_DEVICES": "0"}, gpus=8).local_devices is None
    assert find(OPEN_MPI, gpus=4).local_devices == (1,)
    with pytest.raises(UserError, match="4 processes on this machine for 6 GPUs"):
        find(OPEN_MPI, gpus=6)
