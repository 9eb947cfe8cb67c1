r"""What a policy did: python -m experiments.trajectories --workdir=DIR

    --workdir=runs/rl                        the last iteration, the worst five
    --workdir=runs/rl --iteration=40 --best=3
    --workdir=runs/rl --task=tools --difficulty=2 --seed=17
    --workdir=runs/rl --html=page.html       a page instead of the terminal

Prints the trajectories that a run of experiments.rl has kept, roles in colours, with
the reward, the advantage and the log-probabilities of every turn.
"""

import pathlib

from absl import flags
from rich.console import Console

from experiments import cli
from kimi_jax.data.tokenizer_files import load_tokenizer
from kimi_jax.environments.format import make_format
from kimi_jax.errors import UserError
from kimi_jax.monitor.metrics import replace_file
from kimi_jax.rl import archive, viewer
from kimi_jax.rl.archive import Entry
from kimi_jax.train import workdir

flags.DEFINE_integer("iteration", None, "left out: the last one")
flags.DEFINE_string("task", None, "only this environment")
flags.DEFINE_integer("difficulty", None, "only this difficulty")
flags.DEFINE_integer("seed", None, "only this seed of a task")
flags.DEFINE_integer("group", None, "only this group")
flags.DEFINE_integer(
    "worst", None, "how many, the lowest rewards first (default 5)", lower_bound=1
)
flags.DEFINE_integer("best", None, "how many, the highest rewards first", lower_bound=1)
flags.DEFINE_string("html", None, "file for a page; left out: print")


def main(overrides: list[str]) -> None:
    given, console = flags.FLAGS, Console()
    if overrides:
        raise UserError(
            f"--config.{overrides[0]}: this command reads, it has no config"
        )
    folder = pathlib.Path(given.workdir)
    cfg = workdir.load_config(folder)
    if cfg.rl is None:
        raise UserError(
            f"--workdir={folder} holds a run of supervised training; name one of "
            "python -m experiments.rl"
        )
    found = archive.iterations(folder)
    iteration = given.iteration
    if iteration is None:
        iteration = found[-1] if found else 0
    entries = _choose(archive.read(folder, iteration))
    form = make_format(load_tokenizer(cfg.data.tokenizer))
    if given.html:
        replace_file(given.html, viewer.to_html(entries, form))
        console.print(f"{len(entries)} trajectories in {given.html}", soft_wrap=True)
        return
    for entry in entries:
        console.print(viewer.to_text(entry, form), soft_wrap=True)


def _choose(entries: list[Entry]) -> list[Entry]:
    """Those that the flags ask for."""
    given = flags.FLAGS
    if given.worst is not None and given.best is not None:
        raise UserError("give one of --worst and --best")
    wanted = {
        "task": (given.task, lambda t: t.task.environment),
        "difficulty": (given.difficulty, lambda t: t.task.difficulty),
        "seed": (given.seed, lambda t: t.task.seed),
        "group": (given.group, lambda t: t.group),
    }
    for name, (value, read) in wanted.items():
        have = sorted({read(entry.trajectory) for entry in entries})
        entries = [e for e in entries if value is None or read(e.trajectory) == value]
        if not entries:
            raise UserError(f"--{name}={value}: none is left; there are {have}")
    sign = -1.0 if given.best is not None else 1.0
    count = given.best if given.best is not None else given.worst
    ordered = sorted(entries, key=lambda e: sign * e.trajectory.reward)
    return ordered[: 5 if count is None else count]


if __name__ == "__main__":
    cli.run(main, workdir=True)
