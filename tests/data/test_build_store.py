"""Tokenising: the same bytes however often it was stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kimi_jax.data import build_store as building
from kimi_jax.data import sources
from kimi_jax.data.build_store import build_store, num_replaced, pieces, prepare_store
from kimi_jax.data.tokenizer import ByteTokenizer
from kimi_jax.errors import UserError

BYTES = ByteTokenizer()
FILES = ("tokens.bin", "offsets.bin", "store.json")


@pytest.fixture(autouse=True)
def note_every_shard(monkeypatch) -> None:
    monkeypatch.setattr(building, "_COMMIT_SECONDS", 0.0)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Six files of three documents each."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(6):
        lines = [json.dumps({"text": f"file {i}, line {j}\n" * 9}) for j in range(3)]
        (folder / f"{i}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def contents(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


def read_files(monkeypatch) -> list[str]:
    """The names of the files that are read from now on."""
    seen: list[str] = []
    member = sources._read_member

    def watched(file, advance):
        seen.append(file.name)
        return member(file, advance)

    monkeypatch.setattr(sources, "_read_member", watched)
    return seen


@pytest.mark.parametrize("stop", [0, 1, 4, 5])
def test_stopped_in_a_shard_it_goes_on_to_the_same_bytes(
    text, tmp_path, monkeypatch, stop
) -> None:
    whole = build_store(str(text), BYTES, tmp_path / "whole").path
    write = building._Builder._write_piece

    def failing(self, piece):
        if piece.startswith(b"file %d, line 1" % stop):
            self._tokens.flush()
            raise KeyboardInterrupt
        write(self, piece)

    with monkeypatch.context() as patch:
        patch.setattr(building._Builder, "_write_piece", failing)
        with pytest.raises(KeyboardInterrupt):
            build_store(str(text), BYTES, tmp_path / "parts")
    with pytest.raises(UserError, match="unfinished token store"):
        building.store.open_store(tmp_path / "parts")
    seen = read_files(monkeypatch)
    build_store(str(text), BYTES, tmp_path / "parts")
    assert seen == [f"{i}.jsonl" for i in range(stop, 6)]
    assert contents(tmp_path / "parts") == contents(whole)


def test_killed_from_outside(text, tmp_path) -> None:
    whole = build_store(str(text), BYTES, tmp_path / "whole").path
    script = (
        "import sys, time\n"
        "from kimi_jax.data import build_store as b, tokenizer\n"
        "b._COMMIT_SECONDS = 0.0\n"
        "shard = b._Builder._write_shard\n"
        "def slow(self, s):\n"
        "    if self._counts.shards == 3:\n"
        "        self._write_document((b'cut off',)); self._tokens.flush()\n"
        "        print('here', flush=True); time.sleep(60)\n"
        "    shard(self, s)\n"
        "b._Builder._write_shard = slow\n"
        "b.build_store(sys.argv[1], tokenizer.ByteTokenizer(), sys.argv[2])\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(text), str(tmp_path / "parts")],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stdout.readline() == b"here\n"
    with pytest.raises(UserError, match="is being written by another process"):
        build_store(str(text), BYTES, tmp_path / "parts")
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    build_store(str(text), BYTES, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(whole)


def test_shards_from_the_first_changed_one_are_read_again(
    text, tmp_path, monkeypatch
) -> None:
    bad = text / "5.jsonl"
    good = bad.read_bytes()
    bad.write_bytes(good[:-9])
    for _ in range(2):
        with pytest.raises(UserError, match=r"5\.jsonl', line 3: not JSON"):
            build_store(str(text), BYTES, tmp_path / "parts")
    bad.write_bytes(good)
    (text / "2.jsonl").write_text('{"text": "new"}')
    seen = read_files(monkeypatch)
    made = build_store(str(text), BYTES, tmp_path / "parts")
    assert seen == [f"{i}.jsonl" for i in range(2, 6)]
    fresh = build_store(str(text), BYTES, tmp_path / "fresh")
    assert contents(made.path) == contents(fresh.path)


def test_a_torn_journal_line_and_lost_tokens(text, tmp_path) -> None:
    folder = tmp_path / "parts"
    (text / "3.jsonl").write_text("{")
    with pytest.raises(UserError):
        build_store(str(text), BYTES, folder)
    (text / "3.jsonl").write_text('{"text": "mended"}')
    journal = folder / "journal.jsonl"
    whole = journal.read_bytes()
    assert whole.count(b"\n") == 4
    journal.write_bytes(whole[:-20])
    tokens = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(tokens[:10])
    with pytest.raises(UserError, match=r"tokens\.bin \(too short\) is damaged"):
        build_store(str(text), BYTES, folder)
    (folder / "tokens.bin").write_bytes(tokens)
    made = build_store(str(text), BYTES, folder)
    fresh = build_store(str(text), BYTES, tmp_path / "fresh")
    assert contents(made.path) == contents(fresh.path)


def test_a_damaged_journal(text, tmp_path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "journal.jsonl").write_text("[1, 2]x\n")
    with pytest.raises(
        UserError, match=r"journal\.jsonl .* is damaged; delete the fold"
    ):
        build_store(str(text), BYTES, folder)


def test_a_finished_store_is_made_once(text, tmp_path, monkeypatch) -> None:
    made = build_store(str(text), BYTES, tmp_path / "store")
    seen = read_files(monkeypatch)
    assert build_store(str(text), BYTES, made.path).digest == made.digest
    assert seen == []
    with pytest.raises(UserError, match=r"is of the source .*; name another folder"):
        build_store("", BYTES, made.path)
    (text / "0.jsonl").write_text('{"text": "changed"}')
    with pytest.raises(UserError, match="has changed since; delete the folder"):
        build_store(str(text), BYTES, made.path)


def test_a_run_keeps_its_tokens_whatever_becomes_of_the_text(text, tmp_path) -> None:
    folder = tmp_path / "run" / "tokens" / "00"
    made = prepare_store(str(text), BYTES, folder)
    (text / "0.jsonl").unlink()
    assert prepare_store(str(text), BYTES, folder).digest == made.digest
    with pytest.raises(UserError, match="is of the source"):
        prepare_store("", BYTES, folder)
    # A source may be a store; then nothing is written.
    opened = prepare_store(str(folder), BYTES, tmp_path / "unused")
    assert opened.digest == made.digest and not (tmp_path / "unused").exists()
    with pytest.raises(UserError, match="is a token store, there is nothing to tok"):
        build_store(str(folder), BYTES, tmp_path / "unused")
    (folder / "store.json").unlink()
    with pytest.raises(UserError, match="unfinished token store"):
        prepare_store(str(folder), BYTES, tmp_path / "unused")


def test_folders_that_are_not_ours(text, tmp_path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "a.tex").write_text("x")
    with pytest.raises(UserError, match="not empty and holds no token store"):
        build_store(str(text), BYTES, tmp_path / "thesis")
    with pytest.raises(UserError, match="is a file; name a folder"):
        build_store(str(text), BYTES, tmp_path / "thesis" / "a.tex")
    with pytest.raises(UserError, match="does not exist"):
        build_store(str(tmp_path / "nowhere"), BYTES, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_no_text_at_all(tmp_path) -> None:
    for name, content in (("a.txt", b" \n"), ("b.jsonl", b'{"text": ""}\n')):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=r"holds no text \(1 documents or files"):
            build_store(str(tmp_path / name), BYTES, tmp_path / f"{name}.store")


def test_a_full_disk(text, tmp_path, monkeypatch) -> None:
    def full(file) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(building, "_sync", full)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on dev"):
        build_store(str(text), BYTES, tmp_path / "store")


class Wrong(ByteTokenizer):
    def __init__(self, token: int):
        self.token = token

    def encode(self, text: bytes) -> np.ndarray:
        return np.full(len(text), self.token, np.uint16)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (272, "gave token 272, outside its vocabulary of 272"),
        (257, "puts <bos> or <eod>"),
    ],
)
def test_a_tokenizer_that_gives_wrong_ids(text, tmp_path, token, message) -> None:
    with pytest.raises(UserError, match=message):
        build_store(str(text), Wrong(token), tmp_path / "store")


def test_a_document_of_many_pieces_and_blank_beginnings(tmp_path) -> None:
    text = b" " * building.PIECE * 2 + b"word\n" * 200_000
    (tmp_path / "a.txt").write_bytes(text)
    store = build_store(str(tmp_path / "a.txt"), BYTES, tmp_path / "store")
    assert store.documents == 1
    np.testing.assert_array_equal(store.tokens_N[1:-1], np.frombuffer(text, np.uint8))


@pytest.mark.parametrize("limit", [5, 16, 100])
def test_pieces_join_to_the_document_between_characters(limit) -> None:
    text = ("木 naïve\n\n\n x\nnext" * 30 + "木" * 200).encode()
    for chunk in (1, 7, 1000):
        chunks = [text[i : i + chunk] for i in range(0, len(text), chunk)]
        found = list(pieces(chunks, limit))
        assert b"".join(found) == text and max(map(len, found)) <= limit
        for piece in found:
            piece.decode()
    assert b"".join(pieces([b"\x80" * 99], limit)) == b"\x80" * 99
    assert list(pieces([], limit)) == list(pieces([b""], limit)) == []


def test_pieces_of_a_large_chunk_take_linear_time() -> None:
    started = time.monotonic()
    assert sum(map(len, pieces([b"x" * (1 << 26)]))) == 1 << 26
    assert time.monotonic() - started < 5


def test_replaced_bytes_are_counted_apart_from_what_was_there() -> None:
    mark = "\N{REPLACEMENT CHARACTER}".encode()
    assert num_replaced(b"plain") == num_replaced(mark) == 0
    assert num_replaced(mark + b"\xff" + mark + b"\xe9") == 2


def test_progress_tells_when_it_ends(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(building, "_REPORT_SECONDS", 0.0)
    reports: list[building.Progress] = []
    store = build_store(str(text), BYTES, tmp_path / "s", progress=reports.append)
    assert [r.shards_done for r in reports] == sorted(r.shards_done for r in reports)
    last = reports[-1]
    assert (last.shards_done, last.shards, last.eta_seconds) == (6, 6, 0.0)
    total = sum(file.stat().st_size for file in text.iterdir())
    assert last.bytes_read == last.bytes_total == total
    assert (last.documents, last.tokens) == (18, len(store.tokens_N))
    assert all(r.eta_seconds is None or r.eta_seconds >= 0 for r in reports)
