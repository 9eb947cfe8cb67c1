"""Filler for tasks of text, by the name that `config.data.haystack` gives."""

from __future__ import annotations

from kimi_jax.data.sources import list_source
from kimi_jax.errors import UserError
from kimi_jax.tasks.text import Corpus, Haystack, Prose, sentences_of

GENERATED = "generated"
_MOST_BYTES = 1 << 26  # of a corpus; it is held in memory


def load_haystack(name: str) -> Haystack:
    """Generated prose, or the first 64 MiB of a source of text.

    Args:
      name: "generated", or what `config.data.sources` may hold, a token store excepted.

    Raises:
      UserError: there is no such source, or no sentence in it.
    """
    if name == GENERATED:
        return Prose()
    sentences: list[bytes] = []
    size = 0
    try:
        for shard in list_source(name).shards:
            for document in shard.read(lambda size: None):
                text = b"".join(document)
                sentences += sentences_of(text)
                size += len(text)
                if size >= _MOST_BYTES:
                    return Corpus(sentences)
    except UserError as error:
        raise UserError(f"config.data.haystack={name!r}: {error}") from error
    return Corpus(sentences)
