"""experiments.sample end to end, straight from a published folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "k3_tiny"


def sample(*arguments):
    command = [sys.executable, "-m", "experiments.sample", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_file_of_prompts_is_answered_once(tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines = [{"prompt": "one", "max_tokens": 3}, {"prompt": "two", "seed": 1, "id": 7}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = (
        f"--checkpoint={GOLDEN}",
        "--tokenizer=bytes",
        f"--file={prompts}",
        f"--out={out}",
        "--max_tokens=5",
    )
    done = sample(*command)
    assert done.returncode == 0, done.stderr
    answers = {a["line"]: a for a in map(json.loads, out.read_text().splitlines())}
    assert answers[2]["id"] == 7 and len(answers[1]["tokens"]) <= 3
    first = out.read_text()
    # Without the last answer: it is made again, and comes out the same.
    kept = first.splitlines(keepends=True)
    out.write_text(kept[0] + kept[1][:20])
    assert "1 were there before" in sample(*command).stderr
    again = [json.loads(line)["tokens"] for line in out.read_text().splitlines()]
    assert again == [json.loads(line)["tokens"] for line in kept]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint=nowhere", "--prompt=a"], "nowhere"),
        (
            [f"--checkpoint={GOLDEN}", "--tokenizer=bytes", "--chat=hi"],
            "there is no chat template",
        ),
    ],
)
def test_bad_input_is_named(arguments, message):
    done = sample(*arguments)
    assert done.returncode == 1 and message in done.stderr
    assert "Traceback" not in done.stderr
