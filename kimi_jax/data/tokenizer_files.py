"""Tokenizers that a file describes: Hugging Face's tokenizer.json, or tiktoken's ranks.

    bytes                  the byte tokenizer; no file
    symbols:N              N symbols that are no text, for generated tasks; no file
    DIR/tokenizer.json     read by the library tokenizers
    DIR/*.model, *.tiktoken
                           "base64 rank" lines, read by the library tiktoken; this is
                           what Kimi K2 and K3 ship (163,584 ranks)

A file `tokenizer_config.json` beside either, as models ship it, says what the file
itself does not:

    bos_token, pad_token       names of special tokens
    eod_token, or eos_token    the token that ends a document; the former if both
    added_tokens_decoder       tiktoken only: {"id": {"content": name}}, the specials
    pat_str                    tiktoken only: the pattern that splits text into words;
                               not needed for the TikTokenTokenizer of Kimi

Without an entry, the first of the usual names below that is a special token of the file
is taken. A file without a pad token pads with eod: no weight falls on such positions. A
chat model may call the end of a turn its eos_token; then write eod_token.

Text is never searched for special tokens: "<|endoftext|>" in a document is text.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kimi_jax.data.formats import optional
from kimi_jax.data.tokenizer import (
    ByteTokenizer,
    SymbolTokenizer,
    Tokenizer,
    checked_ids,
)
from kimi_jax.errors import UserError

USUAL_NAMES = {
    "bos": ("[BOS]", "<bos>", "<s>", "<|bos|>", "<|begin_of_text|>", "<|startoftext|>"),
    "eod": (
        "[EOD]",
        "<eod>",
        "[EOS]",
        "<eos>",
        "</s>",
        "<|eos|>",
        "<|end_of_text|>",
        "<|endoftext|>",
    ),
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
}
_ENTRIES = {
    "bos": ("bos_token",),
    "eod": ("eod_token", "eos_token"),
    "pad": ("pad_token",),
}
_KIMI_RESERVED = 256  # ids after the ranks, named in the config or reserved
# What Kimi's tokenizer counts as a word: a run of Han characters, letters of one case
# pattern (never Han) with an English contraction, up to three digits, punctuation with
# its line breaks, line breaks, other white space.
_NOT_HAN = r"&&[^\p{Han}]]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}" + _NOT_HAN
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}" + _NOT_HAN
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


@dataclasses.dataclass(frozen=True)
class FileTokenizer:
    """A vocabulary whose every token stands for certain bytes. See `Tokenizer`."""

    name: str
    fingerprint: str
    token_bytes: Sequence[bytes]  # by id; empty for specials and unused ids
    bos: int
    eod: int
    pad: int
    encode_text: Callable[[str], Sequence[int]]
    specials: Mapping[str, int]
    needs_text = True

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    @functools.cached_property
    def bytes_per_token(self) -> np.ndarray:
        return np.array([len(token) for token in self.token_bytes], np.float32)

    def encode(self, text: bytes) -> np.ndarray:
        """uint32 [N]; bytes that are not UTF-8 are read as U+FFFD."""
        ids = self.encode_text(text.decode(errors="replace"))
        return np.asarray(ids, np.uint32)

    def decode(self, tokens: Iterable[int] | np.ndarray) -> str:
        ids_N = checked_ids(tokens, self.vocab_size)
        return b"".join(self.token_bytes[i] for i in ids_N).decode(errors="replace")


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `config.data.tokenizer` names; see the module.

    Raises:
      UserError: no such file, not a tokenizer, the library is missing, or no special
        tokens fit bos and eod.
    """
    if name == "bytes":
        return ByteTokenizer()
    kind, colon, number = name.partition(":")
    if kind == "symbols" and colon:
        if not number.isdecimal() or int(number) < 1:
            raise UserError(
                f"config.data.tokenizer={name!r}: write 'symbols:N' with N of 1 or more"
            )
        return SymbolTokenizer(int(number))
    file = pathlib.Path(name).expanduser()
    if file.is_dir():
        known = [file / "tokenizer.json", file / "tiktoken.model"]
        file = next((path for path in known if path.is_file()), file)
    if not file.is_file():
        raise UserError(
            f"config.data.tokenizer={name!r}: no such file; write 'bytes', 'symbols:N' "
            "or the path of a tokenizer.json or of a tiktoken file (.model, .tiktoken)"
        )
    content = file.read_bytes()
    settings = _settings(file)
    if file.suffix == ".json":
        return _hugging_face(name, content, settings)
    return _tiktoken(name, content, settings)


def _settings(file: pathlib.Path) -> Mapping[str, Any]:
    beside = file.with_name("tokenizer_config.json")
    if not beside.is_file():
        return {}
    try:
        settings = json.loads(beside.read_bytes())
    except ValueError as error:
        raise UserError(f"{str(beside)!r} is not JSON ({error}); mend it") from error
    if not isinstance(settings, dict):
        raise UserError(f"{str(beside)!r} is not a JSON object; mend it")
    return settings


def _specials(
    name: str, named: Mapping[str, int], settings: Mapping[str, Any]
) -> dict[str, int]:
    """The ids of bos, eod and pad among the special tokens `named`."""
    where = f"config.data.tokenizer={name!r}"
    found: dict[str, int] = {}
    for role, entries in _ENTRIES.items():
        given = next(
            (settings[entry] for entry in entries if settings.get(entry)), None
        )
        token = given.get("content") if isinstance(given, dict) else given
        if token is not None and token not in named:
            raise UserError(
                f"{where}: tokenizer_config.json says {token!r} is its {role} token, "
                f"but its special tokens are {_some(named)}; correct the entry"
            )
        usual = [usual for usual in USUAL_NAMES[role] if usual in named]
        if token is not None or usual:
            found[role] = named[token if token is not None else usual[0]]
    found.setdefault("pad", found.get("eod", -1))
    for role in ("bos", "eod"):
        if role not in found:
            raise UserError(
                f"{where}: no {role} token; name one of its special tokens, "
                f"{_some(named)}, in tokenizer_config.json beside it: "
                f'{{"{role}_token": "..."}}'
            )
    if found["bos"] == found["eod"]:
        raise UserError(
            f"{where}: bos and eod are the same token, {found['bos']}; documents need "
            "both. Name another special token as bos_token or eod_token in "
            f"tokenizer_config.json beside it; there are {_some(named)}"
        )
    return found


def _some(named: Mapping[str, int]) -> str:
    names = [repr(name) for name in list(named)[:20]]
    return ", ".join(names + ["..."] * (len(named) > 20)) or "none"


def _fingerprint(kind: str, content: bytes, *details: object) -> str:
    digest = hashlib.sha256(content)
    digest.update(repr(details).encode())
    return f"{kind}-{digest.hexdigest()}"


def _hugging_face(
    name: str, content: bytes, settings: Mapping[str, Any]
) -> FileTokenizer:
    where = f"config.data.tokenizer={name!r}"
    library = optional("tokenizers", "tokenizers", where)
    try:
        tokenizer = library.Tokenizer.from_str(content.decode())
        description = json.loads(content)
    except Exception as error:  # the library raises this very class
        raise UserError(f"{where}: not a tokenizer.json ({error})") from error
    # A file may ask to cut texts short or to fill them up; neither is wanted here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    added = tokenizer.get_added_tokens_decoder()
    named = {str(token.content): i for i, token in added.items() if token.special}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    to_bytes = _token_bytes(where, description)
    token_bytes = [b""] * (max(vocabulary.values()) + 1)
    for token, i in vocabulary.items():
        if i not in added:
            token_bytes[i] = to_bytes(token)
        elif not added[i].special:
            token_bytes[i] = token.encode()
    roles = _specials(name, named, settings)

    def encode_text(text: str) -> Sequence[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    fingerprint = _fingerprint("tokenizers", content, sorted(roles.items()))
    return FileTokenizer(
        name,
        fingerprint,
        token_bytes,
        **roles,
        encode_text=encode_text,
        specials=named,
    )


def _token_bytes(where: str, description: Mapping[str, Any]) -> Callable[[str], bytes]:
    """How this kind of vocabulary spells bytes."""
    decoder = description.get("decoder") or {}
    decoders = {part.get("type") for part in [decoder, *decoder.get("decoders", [])]}
    if "ByteLevel" in decoders:
        table = {character: byte for byte, character in enumerate(_byte_alphabet())}
        return lambda token: bytes(table[character] for character in token)
    if (description.get("model") or {}).get("byte_fallback"):
        return _fallback_bytes
    kind = (description.get("model") or {}).get("type")
    raise UserError(
        f"{where}: a {kind} vocabulary that cannot spell every byte, so text would be "
        "lost; use a byte-level one, or one with byte_fallback"
    )


def _byte_alphabet() -> list[str]:
    """The character for each byte in byte-level vocabularies: itself if it prints."""
    printing = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printing]
    return [
        chr(byte) if byte in printing else chr(256 + others.index(byte))
        for byte in range(256)
    ]


def _fallback_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()


def _tiktoken(name: str, content: bytes, settings: Mapping[str, Any]) -> FileTokenizer:
    where = f"config.data.tokenizer={name!r}"
    library = optional("tiktoken", "tiktoken", where)
    ranks = _ranks(where, content)
    kimi = settings.get("tokenizer_class") == "TikTokenTokenizer"
    pattern = settings.get("pat_str") or (KIMI_PATTERN if kimi else None)
    if not pattern:
        raise UserError(
            f"{where}: a tiktoken file does not say how text is split into words; put "
            "its model's tokenizer_config.json beside it, or write one with "
            '{"pat_str": PATTERN, "added_tokens_decoder": {"ID": {"content": NAME}}}'
        )
    named = _added(where, settings, len(ranks), kimi)
    roles = _specials(name, named, settings)
    size = max([*ranks.values(), *named.values()]) + 1
    token_bytes = [b""] * size
    for token, i in ranks.items():
        token_bytes[i] = token
    try:
        encoding = library.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=named
        )
    except Exception as error:  # the library raises ValueError, or panics to this
        raise UserError(f"{where}: tiktoken refuses it ({error})") from error
    fingerprint = _fingerprint(
        "tiktoken", content, pattern, size, sorted(roles.items())
    )
    return FileTokenizer(
        name,
        fingerprint,
        token_bytes,
        **roles,
        encode_text=encoding.encode_ordinary,
        specials=named,
    )


def _ranks(where: str, content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise UserError(
                f"{where}: line {number} is not 'base64 rank'; is this a tiktoken file?"
            ) from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(
            f"{where}: {len(ranks)} ranks that are not 0, 1, 2, ... or lack "
            f"{len(missing)} of the single bytes; the file may be cut short"
        )
    return ranks


def _added(
    where: str, settings: Mapping[str, Any], num_ranks: int, kimi: bool
) -> dict[str, int]:
    """The special tokens of a tiktoken file, by name."""
    try:
        added = {
            int(i): str(token["content"])
            for i, token in (settings.get("added_tokens_decoder") or {}).items()
        }
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise UserError(
            f"{where}: added_tokens_decoder in tokenizer_config.json must be like "
            '{"256": {"content": "[BOS]"}}'
        ) from error
    inside = [i for i in added if i < num_ranks]
    if inside:
        raise UserError(
            f"{where}: added_tokens_decoder names id {inside[0]}, but the file has "
            f"ranks up to {num_ranks - 1}; specials come after them"
        )
    if kimi:
        reserved = range(num_ranks, num_ranks + _KIMI_RESERVED)
        beyond = [i for i in added if i not in reserved]
        if beyond:
            raise UserError(
                f"{where}: {num_ranks} ranks and {_KIMI_RESERVED} specials, but "
                f"added_tokens_decoder names id {beyond[0]}; the file may be cut short"
            )
        added = {i: f"<|reserved_token_{i}|>" for i in reserved} | added
    return {token: i for i, token in added.items()}
