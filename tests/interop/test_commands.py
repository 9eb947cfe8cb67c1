"""The commands as a user types them."""

from tests.interop import goldens
from tests.test_experiments import command


def test_convert_there_and_back_and_what_it_refuses(tmp_path):
    source = goldens.FOLDER / "kimi_linear_tiny"
    native, back = tmp_path / "native", tmp_path / "back"
    done = command("experiments.convert", f"--from={source}", f"--to={native}")
    assert done.returncode == 0, done.stderr
    assert "writing: 100.0% of" in done.stdout and "ETA" in done.stdout
    assert f"verified: {native}" in done.stdout
    done = command("experiments.convert", f"--from={native}", f"--to={back}")
    assert done.returncode == 0, done.stderr
    goldens.same_tensors(source, back)
    done = command("experiments.convert", f"--from={native}", f"--to={back}")
    assert done.returncode == 1 and "exists; name another folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_parity_prints_its_line_and_judges_by_atol():
    checkpoint = f"--checkpoint={goldens.FOLDER / 'kimi_linear_tiny'}"
    done = command("experiments.parity", checkpoint)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    names = [part.partition("=")[0] for part in last.split()]
    assert names == ["max_abs_err", "mean_abs_err", "kl", "top1"]
    done = command("experiments.parity", checkpoint, "--atol=1e-9")
    assert done.returncode == 1
    assert "layer 0 is the first of those compared that deviates" in done.stdout
