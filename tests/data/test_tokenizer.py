"""Bytes to tokens and back."""

import numpy as np
import pytest

from kimi_jax.data.tokenizer import ByteTokenizer, SymbolTokenizer
from kimi_jax.errors import UserError

TOKENIZER = ByteTokenizer()


def test_every_byte_has_its_own_token() -> None:
    text = bytes(range(256))
    tokens_N = TOKENIZER.encode(text)
    assert tokens_N.dtype == np.uint16
    np.testing.assert_array_equal(tokens_N, np.arange(256))


@pytest.mark.parametrize("text", ["", "Exeunt.\n", "naïve — 木"])
def test_text_survives_a_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text.encode())) == text


def test_decode_drops_specials_and_marks_broken_bytes() -> None:
    tokens = [
        TOKENIZER.bos,
        ord("a"),
        0xFF,
        TOKENIZER.pad,
        ord("b"),
        TOKENIZER.eod,
        271,
    ]
    assert TOKENIZER.decode(tokens) == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.parametrize("token", [-1, 272])
def test_decode_refuses_tokens_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(ValueError, match=rf"token {token} is outside 0\.\.271"):
        TOKENIZER.decode(np.array([65, token]))


def test_only_bytes_count_as_bytes() -> None:
    table_W = TOKENIZER.bytes_per_token
    assert table_W.shape == (TOKENIZER.vocab_size,) == (272,)
    assert table_W.sum() == 256
    assert not table_W[[TOKENIZER.pad, TOKENIZER.bos, TOKENIZER.eod]].any()


@pytest.mark.parametrize("text", [b"3 a 1", b"3 16"])
def test_symbols_are_numbers(text: bytes) -> None:
    symbols = SymbolTokenizer(16)
    assert symbols.encode(b" 3 15\n").tolist() == [3, 15]
    word = text.split()[1].decode()
    with pytest.raises(UserError, match=rf"^'{word}' is no token .* numbers 0 to 15"):
        symbols.encode(text)
