r"""Many runs of one file: python -m experiments.sweep --config=... --workdir=DIR ACTION

The file has a get_hyper() that lists settings (configs/hyper.py helps); each is a run
of experiments.train in DIR/ID. The actions:

    --list              the settings, their ids and how far they are
    --run=local:N       run what is not finished, N at a time; Ctrl-C saves and stops
    --emit=shell        print a script with the commands; also slurm, xpk, jobset, ...
    --collect           results.csv, results.md and plots of what is finished

--launch='--nodes=2 ...' passes options to the launcher of --emit.
"""

import inspect
import pathlib
import shlex
import sys

from absl import flags
from rich.console import Console
from rich.text import Text

from experiments import cli
from kimi_jax import flops
from kimi_jax.errors import UserError
from kimi_jax.monitor import plots
from kimi_jax.monitor.metrics import replace_file
from kimi_jax.sweep import board, emit, figures, ladder, local, state, table
from kimi_jax.sweep.settings import Setting, arguments, describe, make_settings

LAUNCHERS = pathlib.Path("experiments/launch")


def main(overrides: list[str]) -> int:
    values = flags.FLAGS
    chosen = [n for n in ("list", "run", "emit", "collect") if getattr(values, n)]
    if len(chosen) != 1:
        raise UserError("name one of --list, --run=local:N, --emit=KIND and --collect")
    file = cli.load_file()
    settings = make_settings(
        file.call("get_hyper", "" if _takes_nothing(file) else None),
        lambda argument: file.call("get_config", argument),
        argument=file.argument,
        common=overrides,
    )
    root = pathlib.Path(values.workdir)
    if chosen == ["emit"]:
        return _emit(file.path, root, settings)
    if chosen == ["list"]:
        return _list(root, settings)
    if chosen == ["run"]:
        return _run(file.path, root, settings)
    return _collect(file, root, settings)


def _takes_nothing(file: cli.ExperimentFile) -> bool:
    """Whether get_hyper() is without parameters; the argument is get_config's then."""
    function = getattr(file.module, "get_hyper", None)
    return function is not None and not inspect.signature(function).parameters


def _list(root: pathlib.Path, settings: list[Setting]) -> int:
    progress = _look(root, settings)
    console = Console()
    for setting in settings:
        run = progress[setting.id]
        words = [setting.id, f"{run.status:8}", f"{run.step:>7}"]
        words += [describe(setting.swept), run.reason]
        console.print(Text("  ".join(words)), soft_wrap=True)
    console.print(board.count(progress))
    return 0


def _run(file: str, root: pathlib.Path, settings: list[Setting]) -> int:
    kind, _, number = flags.FLAGS.run.partition(":")
    if kind != "local" or not number.isdigit() or int(number) < 1:
        raise UserError(f"--run={flags.FLAGS.run}: write local:N, N runs at a time")
    root.mkdir(parents=True, exist_ok=True)
    index = state.Index(root)
    index.add(settings)
    progress = _look(root, settings)
    jobs = [
        _job(file, root, setting)
        for setting in settings
        if progress[setting.id].status != "finished"
    ]
    console = Console()
    skipped = len(settings) - len(jobs)
    console.print(f"{len(settings)} settings, of which {skipped} are finished already")
    with board.Board(console, settings, progress) as shown:
        pool = local.Pool(root, index, int(number), shown.watch)
        shown.eta = pool.eta
        signal = pool.run(jobs)
    progress = _look(root, settings)
    console.print(board.count(progress))
    failed = {run: now for run, now in progress.items() if now.status == "failed"}
    for run, now in failed.items():
        log = root / state.LOGS / f"{run}.log"
        console.print(Text(f"{run} failed: {now.reason}; see {log}"), soft_wrap=True)
    if signal is not None:
        print("stopped; the same command goes on", file=sys.stderr)
        return 128 + signal
    return 1 if failed else 0


def _emit(file: str, root: pathlib.Path, settings: list[Setting]) -> int:
    progress = _look(root, settings)
    tasks = [
        emit.Task(
            emit.job_name(setting.config.name, setting.id),
            describe(setting.swept),
            [*arguments(file, setting), f"--workdir={root / setting.id}"],
        )
        for setting in settings
        if progress[setting.id].status != "finished"
    ]
    options = shlex.split(flags.FLAGS.launch)
    print(emit.script(flags.FLAGS.emit, tasks, options, LAUNCHERS), end="")
    return 0


def _collect(
    file: cli.ExperimentFile, root: pathlib.Path, settings: list[Setting]
) -> int:
    found = {setting.id: table.read(setting, root / setting.id) for setting in settings}
    results = [result for result in found.values() if result is not None]
    groups = table.group(results)
    if not results:
        raise UserError(f"--workdir={root}: none of the sweep's runs has begun there")
    drawn = figures.draw(groups)
    along = getattr(file.module, "LADDER", ())
    notes: list[str] = []
    if along:
        climbed = ladder.climb(groups, along, flags.FLAGS.law)
        notes = ladder.notes(climbed)
        if climbed.points:
            drawn["scaling"] = figures.ladder(climbed.points, climbed.laws)
    progress = _look(root, settings)
    unfinished = {
        f"{s.id}: {describe(s.swept)}": f"{now.status} {now.reason}".strip()
        for s in settings
        if (now := progress[s.id]).status != "finished"
    }
    (root / "plots").mkdir(exist_ok=True)
    for name, figure in drawn.items():
        plots.save_figure(figure, root / "plots" / f"{name}.png")
    replace_file(root / "results.csv", table.to_csv(results))
    title = settings[0].config.name
    page = table.to_markdown(title, groups, unfinished, list(drawn), notes)
    replace_file(root / "results.md", page)
    print(f"{board.count(progress)}; wrote {root / 'results.md'}, .csv and plots/")
    return 0


def _look(root: pathlib.Path, settings: list[Setting]) -> dict[str, state.Progress]:
    index = state.Index(root)
    return {s.id: state.look(root / s.id, index.failure(s.id)) for s in settings}


def _job(file: str, root: pathlib.Path, setting: Setting) -> local.Job:
    steps = setting.config.train.steps
    return local.Job(
        setting.id,
        describe(setting.swept),
        [
            sys.executable,
            "-m",
            "experiments.train",
            *arguments(file, setting),
            f"--workdir={root / setting.id}",
        ],
        steps,
        steps * flops.step_flops(setting.config),
    )


if __name__ == "__main__":
    flags.DEFINE_bool("list", False, "show the settings and how far they are")
    flags.DEFINE_string("run", "", "local:N, N runs at a time")
    flags.DEFINE_string("emit", "", "shell, or a launcher of experiments/launch")
    flags.DEFINE_string("launch", "", "options of the launcher")
    flags.DEFINE_bool("collect", False, "write results.csv, results.md and plots")
    flags.DEFINE_enum("law", "power", sorted(ladder.FITS), "of a ladder")
    cli.run(main, config=True, workdir=True)
