"""Small tokenizer files, trained on the spot."""

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SENTENCES = ["to be or not to be, that is the question\n", "Die Würde — 木\n"] * 20
ROLES = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}
KIMI = {"tokenizer_class": "TikTokenTokenizer", **ROLES}


def hugging_face(specials: list[str]) -> Tokenizer:
    """A byte-level BPE of 300 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def write_hugging_face(
    folder: Path, specials: tuple[str, ...] = ("<s>", "</s>")
) -> str:
    folder.mkdir(exist_ok=True)
    tokenizer = hugging_face(list(specials))
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    # Settings that a file may carry and that must not touch a document.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=7)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def ranks(merges: tuple[str, ...] = ("th", "the", " the", "木")) -> bytes:
    tokens = [bytes([byte]) for byte in range(256)]
    for merge in merges:
        # A rank is reached by joining two of lower rank.
        word = merge.encode()
        tokens += [word[:end] for end in range(2, len(word) + 1)]
    unique = list(dict.fromkeys(tokens))
    return b"".join(
        base64.b64encode(token) + f" {rank}\n".encode()
        for rank, token in enumerate(unique)
    )


def write_tiktoken(
    folder: Path, settings: dict[str, Any] | None = None, content: bytes | None = None
) -> str:
    """A tiktoken.model with specials after its ranks, as Kimi ships it."""
    folder.mkdir(exist_ok=True)
    content = ranks() if content is None else content
    count = content.count(b"\n")
    added = {count: "[BOS]", count + 1: "[EOS]", count + 255: "[PAD]"}
    decoder = {str(i): {"content": token} for i, token in added.items()}
    values = {"added_tokens_decoder": decoder, **KIMI} | (settings or {})
    (folder / "tiktoken.model").write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return str(folder / "tiktoken.model")
