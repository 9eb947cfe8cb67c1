"""experiments.sample end to end, straight from a published folder."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageDraw

from kimi_jax.data.tokenizer import ByteTokenizer
from kimi_jax.modules import transformer, vision
from kimi_jax.train.checkpoint import Checkpointer
from kimi_jax.train.step import State
from tests import tiny
from tests.modules import vision_cases

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
        (
            [f"--checkpoint={GOLDEN}", "--prompt=<image>", f"--image={__file__}"],
            f"{__file__} is no image",
        ),
        (
            [f"--checkpoint={GOLDEN}", "--prompt=a <image> <image>", "--image=a.png"],
            "--prompt has 2 <image> for 1 --image; write one for",
        ),
    ],
)
def test_bad_input_is_named(arguments, message):
    done = sample(*arguments)
    assert done.returncode == 1 and message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_nothing_is_left_of_a_file_that_does_not_fit(tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "too long", "max_tokens": 9}\n')
    done = sample(
        f"--checkpoint={GOLDEN}",
        "--tokenizer=bytes",
        f"--file={prompts}",
        f"--out={out}",
        "--max_tokens=2",
        "--length=12",
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{prompts}, line 2: 9 tokens and 9 more do not fit into 12" in done.stderr
    assert not out.exists()


@pytest.mark.slow
def test_an_image_file_is_seen(tmp_path):
    """A picture drawn by Pillow, and the text that the whole pass gives for it."""
    cfg = vision_cases.make()
    variables = tiny.variables(cfg.model)
    state = State(jnp.int32(1), variables["params"], {}, {})
    with Checkpointer(tmp_path / "run", cfg, {}) as checkpoints:
        checkpoints.save(state)
    picture = Image.new("RGB", (9, 6), "white")
    ImageDraw.Draw(picture).ellipse((2, 1, 7, 5), fill="navy")
    picture.save(tmp_path / "drawn.png")
    given = (f"--checkpoint={tmp_path / 'run'}", "--prompt=a <image> is")
    settings = ("--max_tokens=3", "--temperature=0")
    done = sample(*given, f"--image={tmp_path / 'drawn.png'}", *settings)
    assert done.returncode == 0, done.stderr

    # 9 x 6 pixels are 3 x 5 patches of 2, padded to 4 x 6: 6 merged ones.
    canvas = np.zeros((8, 12, 3))
    canvas[:6, :9] = np.asarray(picture)
    cut = (canvas / 127.5 - 1).reshape(4, 2, 6, 2, 3).transpose(0, 2, 4, 1, 3)
    media = vision_cases.media([(cut.reshape(24, 12), [(1, 4, 6)])])
    features = vision.features(cfg.model, variables, media)[:, :6]
    tokens = [257, *b"a ", *[cfg.model.vision.placeholder] * 6, *b" is"]
    # What follows a position does not reach it, so that one program serves them all.
    apply = jax.jit(transformer.apply, static_argnums=0)
    for at in range(len(tokens), len(tokens) + 3):
        row = jnp.array([tokens + [0] * (20 - at)])
        out = apply(cfg.model, variables, row, features_BMD=features)
        logits_W = transformer.logits(out.h_BTD[0, at - 1], out.unembed_DW)
        tokens.append(int(logits_W.argmax()))
    assert done.stdout == ByteTokenizer().decode(tokens[-3:]) + "\n"

    done = sample(*given, *settings)
    assert done.returncode == 1 and "give the file with --image=FILE" in done.stderr
