"""Write or refresh the report of a run: python -m experiments.report --workdir=DIR

Makes report.md, plots/*.png and summary.json from the metrics alone, at any time, and
does not disturb a run that is still going.
"""

from absl import flags

from experiments import cli
from kimi_jax.errors import UserError
from kimi_jax.monitor.report import build_report


def main(_: list[str]) -> None:
    try:
        path = build_report(flags.FLAGS.workdir)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(str(error)) from error
    print(f"wrote {path}, with plots and summary.json beside it")


if __name__ == "__main__":
    cli.run(main, workdir=True)
