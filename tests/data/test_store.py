"""Token stores: what is on disk, and what is refused."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from kimi_jax.data import store as stores
from kimi_jax.data.build_store import build_store
from kimi_jax.data.store import check_vocabulary, open_store
from kimi_jax.data.tokenizer import ByteTokenizer
from kimi_jax.data.tokenizer_files import load_tokenizer
from kimi_jax.errors import UserError
from tests.data import tokenizer_cases as cases

TEXTS = [b"to be", "木".encode(), b"caf\xe9 \xff", b"x" * 300]
BYTES = ByteTokenizer()


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "text").mkdir()
    for i, text in enumerate([*TEXTS, b" \n"]):
        (tmp_path / "text" / f"{i}.txt").write_bytes(text)
    return str(tmp_path / "text")


@pytest.fixture
def store(source: str, tmp_path: Path) -> stores.TokenStore:
    return build_store(source, BYTES, tmp_path / "store")


def test_documents_stand_between_bos_and_eod(store) -> None:
    assert (store.documents, store.meta.empty) == (len(TEXTS), 1)
    assert store.tokens_N.dtype == np.uint16 and store.offsets_M.dtype == np.int64
    want = [[257, *text, 258] for text in TEXTS]
    assert store.tokens_N.tolist() == [token for ids in want for token in ids]
    sizes = [0, *map(len, want)]
    assert store.offsets_M.tolist() == np.cumsum(sizes).tolist()
    assert store.meta.text_bytes == store.meta.token_bytes == sum(map(len, TEXTS))
    assert isinstance(store.tokens_N, np.memmap) and store.meta.replaced == 0
    store.verify()


def test_a_vocabulary_above_65536_takes_uint32(source, tmp_path) -> None:
    content = cases.ranks() + b"".join(
        cases.base64.b64encode(b"%c%c%c" % divmod3(i)) + f" {i}\n".encode()
        for i in range(cases.ranks().count(b"\n"), 1 << 16)
    )
    tokenizer = load_tokenizer(cases.write_tiktoken(tmp_path / "t", content=content))
    store = build_store(source, tokenizer, tmp_path / "store")
    assert tokenizer.vocab_size == (1 << 16) + 256
    assert store.tokens_N.dtype == np.uint32
    assert store.tokens_N[0] == tokenizer.bos > 65535
    # Two bytes of TEXTS are not UTF-8.
    assert store.meta.replaced == 2
    assert tokenizer.decode(
        store.tokens_N[store.offsets_M[1] : store.offsets_M[2]]
    ) == ("木")
    store.verify()


def divmod3(i: int) -> tuple[int, int, int]:
    return 200 + i // 65536, i // 256 % 256, i % 256


def test_equal_contents_have_equal_digests(source, tmp_path, store) -> None:
    again = build_store(source, BYTES, tmp_path / "again")
    assert again.digest == store.digest
    (Path(source) / "0.txt").write_bytes(b"to bE")
    changed = build_store(source, BYTES, tmp_path / "changed")
    assert changed.digest != store.digest
    assert changed.meta.source_identity != store.meta.source_identity


def test_opening_reads_no_tokens(tmp_path: Path) -> None:
    """A stream of 2 TB, nearly all of it a hole, opens at once."""
    source = tmp_path / "a.txt"
    source.write_bytes(b"ab")
    folder = build_store(str(source), BYTES, tmp_path / "store").path
    values = json.loads((folder / "store.json").read_text())
    values["tokens"] = 1 << 40
    with open(folder / "tokens.bin", "r+b") as file:
        file.truncate(2 << 40)
        file.seek(-2, 2)
        file.write(BYTES.eod.to_bytes(2, "little"))
    np.array([0, 1 << 40], "<i8").tofile(folder / "offsets.bin")
    (folder / "store.json").write_text(json.dumps(values))
    assert len(open_store(folder).tokens_N) == 1 << 40


def test_pickling_takes_the_path_along_not_the_tokens(store) -> None:
    data = pickle.dumps(store)
    assert len(data) < 500
    np.testing.assert_array_equal(pickle.loads(data).tokens_N, store.tokens_N)


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin"])
def test_a_truncated_store_is_refused(store, name) -> None:
    file = store.path / name
    content = file.read_bytes()
    for cut in (content[:-2], b"", content + b"\0"):
        file.write_bytes(cut)
        with pytest.raises(UserError, match=f"truncated or damaged: {name} has"):
            open_store(store.path)
    file.unlink()
    with pytest.raises(UserError, match=f"{name} has 0 bytes"):
        open_store(store.path)


def test_damage_that_sizes_do_not_show(store) -> None:
    file = store.path / "tokens.bin"
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)
    opened = open_store(store.path)
    with pytest.raises(UserError, match="do not match its digest"):
        opened.verify()
    content[0] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="ends are not those of whole documents"):
        open_store(store.path)


def test_a_token_outside_the_vocabulary(store) -> None:
    file = store.path / "tokens.bin"
    content = bytearray(file.read_bytes())
    content[10:12] = (272).to_bytes(2, "little")
    file.write_bytes(content)
    values = json.loads((store.path / "store.json").read_text())
    values["digest"] = stores.content_digest(store.path, "uint16")
    (store.path / "store.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="token 272 is outside its vocabulary of 272"):
        open_store(store.path).verify()


def test_another_tokenizer_is_refused(store, tmp_path) -> None:
    open_store(store.path, BYTES)
    name = cases.write_tiktoken(tmp_path / "t")
    first = load_tokenizer(name)
    with pytest.raises(UserError, match=r"written by the tokenizer 'bytes', not by '"):
        open_store(store.path, first)
    made = build_store(str(tmp_path / "text"), first, tmp_path / "other")
    changed = load_tokenizer(
        cases.write_tiktoken(tmp_path / "t", content=cases.ranks(()))
    )
    assert changed.name == first.name
    with pytest.raises(UserError, match="whose file has changed since"):
        open_store(made.path, changed)


def test_no_store_and_other_versions(store, tmp_path) -> None:
    with pytest.raises(UserError, match="holds no token store; make one with python"):
        open_store(tmp_path)
    file = store.path / "store.json"
    values = json.loads(file.read_text())
    for text, message in (
        (json.dumps(values | {"version": 9}), "is of version 9, this code reads 1"),
        (json.dumps({"version": 1}), "store.json is not readable"),
        ("{", "store.json is not readable"),
        ("[]", "store.json is not readable"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            open_store(store.path)
    file.unlink()
    with pytest.raises(UserError, match="unfinished token store"):
        open_store(store.path)


def test_a_model_with_too_few_embeddings() -> None:
    check_vocabulary(BYTES, 272)
    with pytest.raises(UserError, match=r"--config\.model\.vocab_size=272 or more"):
        check_vocabulary(BYTES, 271)
