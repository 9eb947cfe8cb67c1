"""tokenizer.json and tiktoken files: ids, specials, bytes, and clear refusals."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from tokenizers import Tokenizer, decoders, models

from kimi_jax.data.build_store import pieces
from kimi_jax.data.tokenizer import ByteTokenizer
from kimi_jax.data.tokenizer_files import KIMI_PATTERN, load_tokenizer
from kimi_jax.errors import UserError
from tests.data import tokenizer_cases as cases

TEXTS = [
    "",
    "to be, or not",
    "naïve — 木 \U0001f600\n\n  x",
    "a\r\n\tb",
    "<s></s>[BOS]",
]


@pytest.fixture(scope="module", params=["tokenizers", "tiktoken"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write = cases.write_hugging_face if request.param == "tokenizers" else None
    return load_tokenizer((write or cases.write_tiktoken)(folder / "x"))


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_and_is_never_a_special(tokenizer, text) -> None:
    ids_N = tokenizer.encode(text.encode())
    assert ids_N.dtype == np.uint32 and tokenizer.decode(ids_N) == text
    assert not {tokenizer.bos, tokenizer.eod, tokenizer.pad} & set(ids_N.tolist())
    assert tokenizer.bytes_per_token[ids_N].sum() == len(text.encode())


def test_broken_utf8_is_replaced(tokenizer) -> None:
    ids_N = tokenizer.encode(b"a\xffb\xe6\x9c")
    assert tokenizer.needs_text
    assert tokenizer.decode(ids_N) == "a\N{REPLACEMENT CHARACTER}b" + (
        "\N{REPLACEMENT CHARACTER}"
    )


def test_specials_vanish_and_ids_are_checked(tokenizer) -> None:
    ids = [tokenizer.bos, *tokenizer.encode(b"be"), tokenizer.eod, tokenizer.pad]
    assert tokenizer.decode(ids) == "be"
    assert tokenizer.bytes_per_token.shape == (tokenizer.vocab_size,)
    assert not tokenizer.bytes_per_token[[tokenizer.bos, tokenizer.eod]].any()
    with pytest.raises(UserError, match=f"outside 0..{tokenizer.vocab_size - 1}"):
        tokenizer.decode([tokenizer.vocab_size])


def test_a_long_document_encodes_in_pieces_as_at_once(tokenizer) -> None:
    lines = "\n".join(f"line {i}: the quick, 木 fox's {i * i}" for i in range(300))
    text = (lines + "\n\n\n  indented\n").encode()
    whole = tokenizer.encode(text)
    cut = [tokenizer.encode(piece) for piece in pieces([text[:99], text[99:]], 100)]
    assert len(cut) > 50
    np.testing.assert_array_equal(np.concatenate(cut), whole)


def test_hugging_face_ids_are_those_of_the_library(tmp_path: Path) -> None:
    name = cases.write_hugging_face(tmp_path)
    tokenizer = load_tokenizer(name)
    plain = Tokenizer.from_file(name)
    plain.no_truncation()
    plain.no_padding()
    for text in (*cases.SENTENCES[:2], "call <tool> now"):
        want = plain.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text.encode()).tolist() == want
        assert tokenizer.decode(want) == text
    assert tokenizer.vocab_size == plain.get_vocab_size() < 301
    assert (tokenizer.bos, tokenizer.eod, tokenizer.pad) == (0, 1, 1)
    # The folder will do as well.
    assert load_tokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint


def test_kimi_splits_han_numbers_and_contractions(tmp_path: Path) -> None:
    # Every word is a rank of its own, so the ids show how text was split.
    words = ["中文", "English", "混合", "123", "456", "7", "'", "It's", " Pascal"]
    content = cases.ranks(tuple(words))
    tokenizer = load_tokenizer(cases.write_tiktoken(tmp_path, content=content))

    def split(text: str) -> list[str]:
        ids = tokenizer.encode(text.encode())
        return [tokenizer.decode([i]) for i in ids]

    assert split("中文English混合") == ["中文", "English", "混合"]
    assert split("1234567") == ["123", "456", "7"]
    assert split("It's Pascal") == ["It's", " Pascal"]


def test_kimi_reserves_256_ids_and_names_some(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(cases.write_tiktoken(tmp_path))
    count = cases.ranks().count(b"\n")
    assert tokenizer.vocab_size == count + 256
    roles = (tokenizer.bos, tokenizer.eod, tokenizer.pad)
    assert roles == (count, count + 1, count + 255)
    want = tiktoken.Encoding(
        "k",
        pat_str=KIMI_PATTERN,
        mergeable_ranks=load_tiktoken_bpe(str(tmp_path / "tiktoken.model")),
        special_tokens={},
    ).encode_ordinary("the 木 thesis")
    assert tokenizer.encode("the 木 thesis".encode()).tolist() == want


def test_other_tiktoken_files_say_their_pattern(tmp_path: Path) -> None:
    settings = {"tokenizer_class": "Other", "pat_str": r"\w+|\W+"}
    tokenizer = load_tokenizer(cases.write_tiktoken(tmp_path, settings))
    assert tokenizer.decode(tokenizer.encode(b"the end")) == "the end"
    assert tokenizer.vocab_size == cases.ranks().count(b"\n") + 256
    with pytest.raises(UserError, match=r"does not say how text is split.*pat_str"):
        load_tokenizer(cases.write_tiktoken(tmp_path, settings | {"pat_str": None}))


def test_eod_token_goes_before_eos_token(tmp_path: Path) -> None:
    settings = {
        "eod_token": {"content": "[EOS]"},
        "eos_token": "<|reserved_token_270|>",
    }
    one = load_tokenizer(cases.write_tiktoken(tmp_path, settings))
    assert one.decode([one.eod]) == "" and one.eod == cases.ranks().count(b"\n") + 1
    two = load_tokenizer(cases.write_tiktoken(tmp_path, settings | {"eod_token": None}))
    assert two.eod == 270 and two.fingerprint != one.fingerprint


@pytest.mark.parametrize(
    ("specials", "settings", "message"),
    [
        (("<s>",), {}, r"no eod token; name one of its special tokens, '<s>', in"),
        (("</s>",), {}, r'no bos token; .*\{"bos_token": "\.\.\."\}'),
        ((), {}, "no bos token; name one of its special tokens, none"),
        (("<|endoftext|>",), {"bos_token": "<|endoftext|>"}, "the same token, 0"),
        (("<s>", "</s>"), {"eos_token": "<eos>"}, "says '<eos>' is its eod token, but"),
    ],
)
def test_missing_specials(tmp_path, specials, settings, message) -> None:
    name = cases.write_hugging_face(tmp_path, specials)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=message):
        load_tokenizer(name)


def test_vocabularies_that_lose_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]")).save(str(file))
    with pytest.raises(UserError, match="a WordLevel vocabulary that cannot spell"):
        load_tokenizer(str(file))


def test_byte_fallback_vocabularies(tmp_path: Path) -> None:
    vocabulary = {"<s>": 0, "</s>": 1, "▁": 2, "b": 3, "▁b": 4}
    vocabulary |= {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "b")], byte_fallback=True))
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    ids = loaded.encode("b木".encode()).tolist()
    assert ids == [3, *(5 + byte for byte in "木".encode())]
    assert loaded.decode([4, *ids]) == " bb木"
    assert loaded.bytes_per_token[[4, 3, 5]].tolist() == [2, 1, 1]


def test_files_that_are_no_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file; write 'bytes'"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    folder = tmp_path / "t"
    for content, message in (
        (b"hello world\n", "line 1 is not 'base64 rank'"),
        (cases.ranks()[:1000], "line 124 is not"),
        (b"".join(cases.ranks().splitlines(True)[:99]), "may be cut short"),
        (b"", "lack 256 of the single bytes"),
    ):
        with pytest.raises(UserError, match=message):
            load_tokenizer(cases.write_tiktoken(folder, content=content))
    for settings, message in (
        ({"added_tokens_decoder": {"5": {"content": "x"}}}, "names id 5, but the file"),
        ({"added_tokens_decoder": {"x": 1}}, "must be like"),
        (
            {"added_tokens_decoder": {"163584": {"content": "[BOS]"}}},
            "names id 163584; the file may be cut short",
        ),
        ({"pat_str": "("}, "tiktoken refuses it"),
    ):
        with pytest.raises(UserError, match=message):
            load_tokenizer(cases.write_tiktoken(folder, settings))
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(UserError, match="is not JSON"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("library", ["tokenizers", "tiktoken"])
def test_a_missing_library_is_named(tmp_path, monkeypatch, library) -> None:
    file = tmp_path / ("tokenizer.json" if library == "tokenizers" else "a.tiktoken")
    file.write_text("{}")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=re.escape(f"`pip install {library}`")):
        load_tokenizer(str(file))


def test_bytes_need_no_file() -> None:
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
