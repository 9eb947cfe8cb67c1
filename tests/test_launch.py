"""Launchers print exactly what they run, and it is the same training command."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest
import yaml

LAUNCH = pathlib.Path("experiments/launch")
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
# Words that a careless script would split, expand or lose.
TRAIN = (
    "--config=configs/k3.py",
    "--workdir=/mnt/runs/k3",
    """--config.name=it's "$HOME" \\ and `more`""",
    "--config.data.sources=a b,c",
)
COMMAND = ("python", "-m", "experiments.train", *TRAIN)
OPTIONS = {
    "slurm": ("--nodes=2", "--gpus=8", "--partition=big"),
    "tpu_vm": (
        "--name=n",
        "--project=p",
        "--zone=z",
        "--type=v5p-16",
        "--runtime=r",
        "--slices=2",
    ),
    "xpk": (
        "--name=n",
        "--cluster=c",
        "--project=p",
        "--zone=z",
        "--type=v5p-16",
        "--image=i:1",
    ),
    "jobset": (
        "--name=n",
        "--accelerator=tpu-v5p-slice",
        "--topology=2x2x4",
        "--hosts=4",
        "--image=i:1",
        "--claim=shared",
        "--slices=2",
    ),
    "skypilot": ("--name=n", "--gpus=H200:8", "--bucket=s3://b", "--nodes=2"),
    "local": ("--processes=2",),
}
# Stands for the tools of the clouds; notes what it was called with.
STUB = f"""#!{sys.executable} -IS
import json, os, pathlib, sys
given = sys.stdin.read().rstrip("\\n") or None
words = [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]
with open(os.environ["RECORD"], "a") as record:
    print(json.dumps([words, given]), file=record)
if "describe" in words:
    print("ACTIVE")
"""


def launch(name, *arguments, **environment):
    return subprocess.run(
        ["bash", str(LAUNCH / f"{name}.sh"), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
        check=False,
    )


def printed(text):
    """The commands in the output of a launcher, each as [words, input]."""
    found, lines = [], iter(text.splitlines())
    for line in lines:
        if not line.startswith("+ "):
            continue
        command, fed, _ = line[2:].partition(" <<'EOF'")
        given = "\n".join(iter(lambda: next(lines), "EOF")) if fed else None
        found.append([shlex.split(command), given])
    return found


def dry_run(name, *options):
    done = launch(name, *OPTIONS[name], *options, "--dry-run", "--", *TRAIN)
    assert done.returncode == 0, done.stderr
    return printed(done.stdout)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "local"])
def test_what_is_printed_is_what_runs(name, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("sbatch", "gcloud", "git", "xpk", "kubectl", "sky"):
        (tools / tool).write_text(STUB)
        (tools / tool).chmod(0o755)
    record = tmp_path / "record"
    done = launch(
        name,
        *OPTIONS[name],
        "--",
        *TRAIN,
        PATH=f"{tools}:{os.environ['PATH']}",
        RECORD=str(record),
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    ran = [json.loads(line) for line in record.read_text().splitlines()]
    said = [pair for pair in printed(done.stdout) if pair[0][0] != "tee"]
    assert said == ran
    folder = str(tmp_path)

    def without_names(pairs):
        return [
            [[re.sub(rf"{folder}/tmp[.\w]*", "FILE", word) for word in words], given]
            for words, given in pairs
        ]

    dry = launch(name, *OPTIONS[name], "--dry-run", "--", *TRAIN, TMPDIR=folder)
    assert without_names(printed(dry.stdout)) == without_names(printed(done.stdout))
    # Temporary files are gone.
    assert {path.name for path in tmp_path.iterdir()} == {"tools", "record"}


def test_slurm():
    ((words, script),) = dry_run("slurm")
    assert words == ["sbatch"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    lines = script.splitlines()
    asked = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in lines
        if line.startswith("#SBATCH ")
    )
    assert asked["nodes"] == "2" and asked["gpus-per-node"] == "8"
    assert asked["partition"] == "big" and "account" not in asked
    assert asked["signal"] == "TERM@300" and asked["ntasks-per-node"] == "1"
    srun = shlex.split(lines[-1])
    assert srun[0] == "srun" and tuple(srun[-len(COMMAND) :]) == COMMAND


def test_tpu_vm():
    commands = [words for words, _ in dry_run("tpu_vm")]
    create, look, archive, copy, install, start = commands
    assert create[:5] == ["gcloud", "compute", "tpus", "queued-resources", "create"]
    assert {"--node-count=2", "--node-prefix=n", "--project=p"} <= set(create)
    assert "describe" in look and archive[:2] == ["git", "archive"]
    everywhere = {"--node=all", "--worker=all", "--zone=z", "--project=p"}
    for command in (copy, install, start):
        assert everywhere <= set(command)
    shell = start[-1].removeprefix("--command=cd kimi_jax || exit 1; nohup ")
    expected = (".venv/bin/python", *COMMAND[1:])
    assert tuple(shlex.split(shell)[: len(COMMAND)]) == expected
    single = [words for words, _ in dry_run("tpu_vm", "--slices=1", "--create=no")]
    assert len(single) == 5 and not any("create" in words for words in single)
    (create, *_) = (w for w, _ in dry_run("tpu_vm", "--slices=1", "--spot=yes"))
    assert {"--node-id=n", "--spot"} <= set(create)


def test_a_tpu_that_was_taken_away_ends_the_wait(tmp_path):
    (tmp_path / "gcloud").write_text("#!/bin/sh\necho SUSPENDED\n")
    (tmp_path / "gcloud").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    options = (*OPTIONS["tpu_vm"], "--create=no", "--", *TRAIN)
    done = launch("tpu_vm", *options, PATH=path)
    assert done.returncode == 2 and "n is SUSPENDED; delete it" in done.stderr


def test_xpk():
    ((words, _),) = dry_run("xpk", "--slices=2")
    assert words[:3] == ["xpk", "workload", "create"]
    options = dict(word.removeprefix("--").split("=", 1) for word in words[3:])
    assert tuple(shlex.split(options["command"])) == COMMAND
    assert options["num-slices"] == "2" and options["docker-image"] == "i:1"


def test_jobset():
    ((words, text),) = dry_run("jobset")
    assert words == ["kubectl", "apply", "-f", "-"]
    manifest = yaml.safe_load(text)
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert manifest["kind"] == "JobSet" and manifest["metadata"]["name"] == "n"
    assert manifest["spec"]["failurePolicy"] == {"maxRestarts": 10}
    (slices,) = manifest["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    assert slices["replicas"] == 2
    # One pod a host, numbered; a lost pod restarts all, as JAX needs.
    assert job["parallelism"] == job["completions"] == 4
    assert job["completionMode"] == "Indexed" and job["backoffLimit"] == 0
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "2x2x4",
    }
    (container,) = pod["containers"]
    # Kubernetes reads $$ as $.
    command = [word.replace("$$", "$") for word in container["command"]]
    assert tuple(command) == COMMAND
    assert {port["containerPort"] for port in container["ports"]} >= {8471, 8482}
    assert container["resources"] == {"limits": {"google.com/tpu": 4}}
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount == {"name": volume["name"], "mountPath": "/mnt/runs"}
    assert volume["persistentVolumeClaim"] == {"claimName": "shared"}


def test_skypilot():
    (_, text), (launch_words, _) = dry_run("skypilot", "--spot=yes", "--infra=gcp")
    assert launch_words[:3] == ["sky", "jobs", "launch"]
    task = yaml.safe_load(text)
    run = task.pop("run")
    assert "uv pip install" in task.pop("setup")
    assert task == {
        "name": "n",
        "num_nodes": 2,
        "workdir": ".",
        "resources": {"accelerators": "H200:8", "use_spot": True, "infra": "gcp"},
        "file_mounts": {"/mnt/runs": {"source": "s3://b", "mode": "MOUNT"}},
    }
    # As a node would run it.
    node = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
    }
    script = run.replace("exec .venv/bin/python", "printf '%s\\0' python")
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, **node}, capture_output=True
    )
    assert tuple(done.stdout.decode().split("\0")[:-1]) == (
        *COMMAND,
        "--config.cluster.coordinator=10.0.0.1:8476",
        "--config.cluster.processes=2",
        "--config.cluster.process=1",
    )


def test_local(tmp_path):
    """Each process has a GPU; one that fails takes the others with it."""
    commands = sorted(words for words, _ in dry_run("local", "--module=experiments.rl"))
    for process, words in enumerate(commands):
        assert tuple(words[:5]) == (
            *("env", f"CUDA_VISIBLE_DEVICES={process}", "python", "-m"),
            "experiments.rl",
        )
        assert tuple(words[5:]) == (
            *TRAIN,
            "--config.cluster.coordinator=localhost:8476",
            "--config.cluster.processes=2",
            f"--config.cluster.process={process}",
        )
    assert len(commands) == 2
    (tmp_path / "python").write_text(
        '#!/bin/sh\n[ "$CUDA_VISIBLE_DEVICES" = 0 ] && exit 3\nexec sleep 60\n'
    )
    (tmp_path / "python").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    started = time.monotonic()
    done = launch("local", *OPTIONS["local"], "--", *TRAIN, PATH=path)
    assert done.returncode == 3 and time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nodes=2", "--", "--workdir=w"), "--config=... is missing"),
        (("--nodes=2", "--", "--config=c"), "--workdir=... is missing"),
        (("--", *TRAIN), "--nodes=... is missing; see"),
        (("--nodes=two", "--", *TRAIN), "--nodes=two: must be a number"),
        (("--node=2", "--", *TRAIN), "--node: no such option; there are --nodes "),
        (("nodes",), "nodes: write --NAME=VALUE"),
    ],
)
def test_mistakes(arguments, words):
    done = launch("slurm", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and words in done.stderr


@pytest.mark.parametrize("name", OPTIONS)
def test_help_names_every_option(name):
    done = launch(name, "--help")
    assert done.returncode == 0
    text = (LAUNCH / f"{name}.sh").read_text()
    required, others = re.search(
        r'^parse "?([\w ]+?)"? (?:\\\n *)?"([\w ]+)"', text, re.MULTILINE
    ).groups()
    for option in (*required.split(), *others.split(), "dry-run"):
        assert f"--{option}" in done.stdout, option


def test_scripts_are_strict_and_known():
    assert {path.stem for path in SCRIPTS} == {*OPTIONS, "common"}
    for path in SCRIPTS:
        if path.stem != "common":
            assert "\nset -euo pipefail\n" in path.read_text()
            assert os.access(path, os.X_OK)


def test_shellcheck():
    beside = pathlib.Path(sys.executable).parent / "shellcheck"
    tool = str(beside) if beside.exists() else shutil.which("shellcheck")
    if tool is None:
        pytest.skip("shellcheck is not installed; it comes with the dev extra")
    done = subprocess.run(
        [tool, "-x", *map(str, SCRIPTS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
