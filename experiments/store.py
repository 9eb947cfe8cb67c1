"""Tokenise text once: python -m experiments.store --config=... --workdir=STORE

Writes the one source of `config.data.sources`, with `config.data.tokenizer`, as a token
store, which `config.data.sources` of any run may then name. The same command goes on
after a kill, and checks every byte of a finished store.
"""

import time

from absl import flags
from rich.console import Console

from experiments import cli
from kimi_jax.data.build_store import build_store
from kimi_jax.data.store import TokenStore, is_store
from kimi_jax.data.tokenizer_files import load_tokenizer
from kimi_jax.errors import UserError
from kimi_jax.monitor.console import print_first_screen
from kimi_jax.monitor.tokenizing import tokenizing_lines


def main(overrides: list[str]) -> None:
    config = cli.load_config(overrides)
    console, sources = Console(), config.data.sources
    if len(sources) > 1:
        raise UserError(
            f"config.data.sources names {len(sources)} sources; tokenise them one at a "
            "time, each into a --workdir of its own: --config.data.sources="
            f"{sources[0]}"
        )
    (source,) = sources
    started, finished = time.monotonic(), is_store(flags.FLAGS.workdir)
    store = build_store(
        source,
        load_tokenizer(config.data.tokenizer),
        flags.FLAGS.workdir,
        progress=tokenizing_lines(console, source),
    )
    if finished:
        store.verify()
    seconds = f"{time.monotonic() - started:.1f} s"
    print_first_screen(
        console,
        [
            (
                "token store",
                [*rows(store), ("verified in" if finished else "made in", seconds)],
            )
        ],
    )


def rows(store: TokenStore) -> list[tuple[str, str | int]]:
    """What the command prints of a finished store."""
    meta = store.meta
    table: list[tuple[str, str | int]] = [
        ("source", meta.title),
        ("tokenizer", f"{meta.tokenizer}, vocabulary of {meta.vocab_size:,}"),
        ("documents", meta.documents),
        ("left out as empty or binary", meta.empty),
        ("tokens", f"{meta.tokens:,} ({meta.dtype})"),
        ("bytes of text", meta.text_bytes),
        ("bytes per token", f"{meta.bytes_per_token:.3f}"),
    ]
    if meta.replaced:
        table.append(("invalid bytes replaced by U+FFFD", meta.replaced))
    if meta.token_bytes != meta.text_bytes:
        table.append(("bytes that the tokens stand for", meta.token_bytes))
    return [*table, ("digest", meta.digest[:16]), ("written to", str(store.path))]


if __name__ == "__main__":
    cli.run(main, config=True, workdir=True)
