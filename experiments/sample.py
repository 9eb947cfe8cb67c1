r"""Text from a model: python -m experiments.sample --checkpoint=DIR --prompt="..."

    --checkpoint=runs/quickstart --prompt=KING --temperature=0.8 --max_tokens=200
    --checkpoint=HF_DIR --chat="What is a delta rule?"
    --checkpoint=DIR --prompt="<image> says" --image=word.png
    --checkpoint=DIR --file=prompts.jsonl --out=answers.jsonl

The checkpoint is a workdir, one of its folders checkpoints/STEP, or a published folder,
whose tokenizer and chat template are used. A file has a line {"prompt": ...} or
{"messages": [...]} for each prompt, with settings of its own if it likes; the same
command goes on after a kill. --config.mesh.AXIS=N spreads the model over devices.
"""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import flags
from jax.sharding import Mesh
from rich.console import Console

from configs import common
from experiments import cli
from kimi_jax import config_io, sharding
from kimi_jax.data.images import read_header
from kimi_jax.data.media import MARK
from kimi_jax.data.tokenizer import Tokenizer
from kimi_jax.data.tokenizer_files import load_tokenizer
from kimi_jax.errors import UserError
from kimi_jax.infer import images
from kimi_jax.infer.batch_file import Answers, read_prompts
from kimi_jax.infer.chat import Chat, load_chat
from kimi_jax.infer.generator import Generator
from kimi_jax.infer.requests import Ask, Request
from kimi_jax.infer.sampling import Sampling
from kimi_jax.infer.text import TextStream, cut
from kimi_jax.interop.load import load_model
from kimi_jax.interop.sources import is_published
from kimi_jax.monitor.console import format_rate, format_seconds
from kimi_jax.train import checkpoint_files

_SECONDS = 5.0


@dataclasses.dataclass
class _Setup:
    """What turns text into requests."""

    tokenizer: Tokenizer
    chat: Chat
    settings: dict[str, Any]  # of the command line; a line may have its own
    prompts: list[dict[str, Any]]

    def request(self, line: dict[str, Any]) -> Request:
        own = self.settings | {k: x for k, x in line.items() if k in self.settings}
        if "messages" in line:
            text = self.chat.render(line["messages"])
            tokens = self.chat.encode(text, self.tokenizer)
        else:
            ids = self.tokenizer.encode(line["prompt"].encode())
            tokens = [self.tokenizer.bos, *ids.tolist()]
        names = [field.name for field in dataclasses.fields(Sampling)]
        stops = {self.tokenizer.eod, *self.chat.ends, *flags.FLAGS.stop_id}
        return Request(
            tuple(tokens),
            Ask(
                own["max_tokens"],
                Sampling(**{name: own[name] for name in names}),
                tuple((stop,) for stop in sorted(stops)),
                own["seed"],
                until=self.text(line).ended if self.stops(line) else None,
            ),
        )

    def stops(self, line: dict[str, Any]) -> list[str]:
        found = line.get("stop", self.settings["stop"])
        return [found] if isinstance(found, str) else list(found)

    def text(self, line: dict[str, Any]) -> TextStream:
        return TextStream(self.tokenizer, self.stops(line))


def main(overrides: list[str]) -> None:
    values, console = flags.FLAGS, Console(stderr=True)
    setup = _set_up()
    requests = []
    for line in setup.prompts:
        with _named(line):
            requests.append(setup.request(line))
    mesh = _mesh(overrides)
    model, variables = load_model(values.checkpoint, mesh)
    if model.vision and not values.image and MARK in (values.prompt or ""):
        raise UserError(f"--prompt has {MARK}; give the file with --image=FILE")
    if values.dtype:
        model = dataclasses.replace(model, dtype=values.dtype)
    if values.image:
        features_MD, grids_I3 = images.look(model, variables, values.image)
        tokens = images.encode(model, values.prompt, grids_I3, setup.tokenizer)
        requests = [Request(tuple(tokens), requests[0].ask, features_MD)]
    length = max(len(r.prompt) + r.ask.max_tokens for r in requests)
    slots = min(values.slots, len(requests))
    if mesh is not None:
        rows = sharding.row_shards(mesh)
        slots = -(-slots // rows) * rows
    allowed = np.arange(model.vocab_size) < setup.tokenizer.vocab_size
    generator = Generator(
        model,
        variables,
        slots=slots,
        length=values.length or length,
        mesh=mesh,
        allowed=allowed,
        cache_dtype=values.cache_dtype,
        # The first text should not wait for many tokens; a file should not wait at all.
        decode_steps=32 if values.file else 8,
    )
    for line, request in zip(setup.prompts, requests, strict=True):
        with _named(line):
            generator.check_request(request)
    if values.file:
        _file(setup, requests, generator, console)
    else:
        _show(setup, requests, generator)


@contextlib.contextmanager
def _named(line: dict[str, Any]) -> Iterator[None]:
    """Puts the line of --file before what is wrong with it."""
    try:
        yield
    except UserError as error:
        if not flags.FLAGS.file:
            raise
        where = f"{flags.FLAGS.file}, line {line['line']}"
        raise UserError(f"{where}: {error}") from error


def _set_up() -> _Setup:
    values = flags.FLAGS
    given = [values.prompt is not None, bool(values.chat), bool(values.file)]
    if sum(given) != 1:
        raise UserError("give one of --prompt, --chat and --file")
    if values.file and not values.out:
        raise UserError("--file needs --out, the file that the answers go to")
    _check_images(values.image, values.prompt)
    path, chat = pathlib.Path(values.checkpoint), Chat(None, {}, {}, ())
    if is_published(path):
        name, chat = str(path), load_chat(path)
    else:
        about = checkpoint_files.read_about(checkpoint_files.find(path))
        name = about["config"]["data"]["tokenizer"]
    try:
        tokenizer = load_tokenizer(values.tokenizer or name)
    except UserError as error:
        message = str(error).replace("config.data.tokenizer=", "--tokenizer=")
        raise UserError(message) from error
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "seed")
    if values.file:
        prompts = read_prompts(values.file)
    elif values.chat:
        prompts = [{"messages": [{"role": "user", "content": values.chat}]}]
    else:
        prompts = [{"prompt": values.prompt}]
    return _Setup(tokenizer, chat, {n: values[n].value for n in names}, prompts)


def _check_images(files: list[str], prompt: str | None) -> None:
    """Raises UserError for what can be told before a model is read."""
    if not files:
        return
    if prompt is None:
        raise UserError(f"--image goes with --prompt, which marks each with {MARK}")
    marks = prompt.count(MARK)
    if marks != len(files):
        raise UserError(
            f"--prompt has {marks} {MARK} for {len(files)} --image; write one for "
            "each, where it belongs"
        )
    for file in files:
        read_header(file)


def _mesh(overrides: list[str]) -> Mesh | None:
    """The mesh of --config.mesh.*; None for one device."""
    wrong = [item for item in overrides if not item.startswith("mesh.")]
    if wrong:
        raise UserError(
            f"--config.{wrong[0]}: the checkpoint says what the model is; only "
            "--config.mesh.AXIS=N can be set here"
        )
    if not overrides:
        return None
    # The sizes that a mesh has to divide are the model's, which is checked as it loads.
    cfg = config_io.from_dict(common.base(), overrides)
    return sharding.make_mesh(cfg)


def _show(setup: _Setup, requests: list[Request], generator: Generator) -> None:
    """Prints the text as it comes."""
    stream = setup.text(setup.prompts[0])
    for piece in generator.stream(requests):
        print(stream.add(piece.tokens, last=bool(piece.finished)), end="", flush=True)
    print()


def _file(
    setup: _Setup, requests: list[Request], generator: Generator, console: Console
) -> None:
    """Writes an answer a line; says how far it is."""
    started = last = time.monotonic()
    drawn = 0
    with Answers(flags.FLAGS.out) as answers:
        open_lines = [
            (line, request)
            for line, request in zip(setup.prompts, requests, strict=True)
            if line["line"] not in answers.done
        ]
        done_before, total = len(answers.done), len(open_lines)
        made: list[tuple[list[int], list[float]]] = [([], []) for _ in open_lines]
        for piece in generator.stream([request for _, request in open_lines]):
            tokens, logprobs = made[piece.number]
            tokens += piece.tokens
            logprobs += piece.logprobs
            drawn += len(piece.tokens)
            if piece.finished:
                line = open_lines[piece.number][0]
                text = setup.tokenizer.decode(tokens)
                answers.write(
                    {
                        "line": line["line"],
                        **({"id": line["id"]} if "id" in line else {}),
                        "text": cut(text, setup.stops(line))[0],
                        "finished": piece.finished,
                        "tokens": tokens,
                        "logprobs": logprobs,
                    }
                )
            now = time.monotonic()
            if now - last > _SECONDS:
                last, done = now, len(answers.done) - done_before
                left = (now - started) * (total - done) / max(done, 1)
                console.print(
                    f"{done} of {total} prompts, {drawn:,} tokens, "
                    f"{format_rate(drawn / (now - started))} tok/s, "
                    f"ETA {format_seconds(left) if done else 'unknown'}",
                    highlight=False,
                )
    console.print(
        f"{total} answers in {flags.FLAGS.out}, {done_before} were there before",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    flags.DEFINE_string("checkpoint", None, "workdir, checkpoint or published folder")
    flags.DEFINE_string("prompt", None, "text to be continued")
    flags.DEFINE_multi_string("image", [], "file for an <image> of the prompt")
    flags.DEFINE_string("chat", None, "a message, put into the model's chat template")
    flags.DEFINE_string("file", None, "prompts, a line of JSON each")
    flags.DEFINE_string("out", None, "file for the answers to --file")
    flags.DEFINE_string("tokenizer", None, "left out: that of the checkpoint")
    flags.DEFINE_integer("max_tokens", 256, "most tokens of an answer")
    flags.DEFINE_float("temperature", 1.0, "0 takes the likeliest token")
    flags.DEFINE_integer("top_k", 0, "draw from the k likeliest; 0: from all")
    flags.DEFINE_float("top_p", 1.0, "draw from the likeliest that make up p")
    flags.DEFINE_float("min_p", 0.0, "draw from those with p of the likeliest's")
    flags.DEFINE_multi_string("stop", [], "text that ends an answer; may be repeated")
    flags.DEFINE_multi_integer("stop_id", [], "token that ends an answer")
    flags.DEFINE_integer("seed", 0, "of the draws")
    flags.DEFINE_integer("slots", 8, "prompts at one time")
    flags.DEFINE_integer("length", 0, "most tokens of a sequence; 0: as many as needed")
    flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "of activations")
    flags.DEFINE_enum("cache_dtype", None, ["float32", "bfloat16"], "of the latents")
    flags.mark_flag_as_required("checkpoint")
    cli.run(main)
