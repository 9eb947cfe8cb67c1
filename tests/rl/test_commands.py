"""The commands of reinforcement learning as a user types them."""

import json

from kimi_jax import config_io
from kimi_jax.rl import archive
from kimi_jax.rl.archive import Entry
from tests import tiny
from tests.rl.test_records import trajectory
from tests.test_config_rl import values
from tests.test_experiments import command


def test_trajectories_are_chosen_and_printed(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_io.to_dict(tiny.make())))
    name = ("experiments.trajectories", f"--workdir={tmp_path}")
    done = command(*name)
    assert done.returncode == 1 and "holds a run of supervised" in done.stderr
    config.write_text(json.dumps(config_io.to_dict(config_io.from_dict(values()))))
    entries = [
        Entry(trajectory(reward=reward, member=i), [reward, reward])
        for i, reward in enumerate((1.0, 0.25, 0.5))
    ]
    archive.write(tmp_path, 3, entries, keep=None)
    done = command(*name, "--worst=2")
    assert done.returncode == 0, done.stderr
    heads = [line for line in done.stdout.splitlines() if "seed 5" in line]
    assert [line.split("reward ")[1][:5] for line in heads] == ["0.250", "0.500"]
    done = command(*name, "--difficulty=4", "--iteration=3")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "--difficulty=4: none is left; there are [1]" in done.stderr


def test_a_config_without_the_section(tmp_path):
    flags = ("--config=configs/quickstart.py", f"--workdir={tmp_path / 'run'}")
    done = command("experiments.rl", *flags)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "use a config that has the section, such as configs/rl_tools" in done.stderr
    assert not (tmp_path / "run").exists()
