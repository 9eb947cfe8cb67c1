"""Expert episodes as training data: rows, weights, streams, bad input."""

import itertools
from pathlib import Path

import chex
import numpy as np
import pytest

from kimi_jax import config_io
from kimi_jax.data.loader import Reader, load_data
from kimi_jax.errors import UserError
from tests import tiny
from tests.environments.readers import FORM

TOOLS = "episodes:tools:difficulty=1/2:length=96"


def make(*overrides: str, sources: str = TOOLS, seq_len: int = 512):
    cfg = tiny.make(
        f"data.sources={sources}",
        f"train.seq_len={seq_len}",
        "train.batch_size=4",
        *overrides,
    )
    return load_data(cfg, Path("unused"))


def episodes(batch, row: int):
    """The tokens of the episodes of a row, and which the policy wrote."""
    segments_T = batch["segment_ids"][row]
    for segment in range(1, int(segments_T.max()) + 1):
        place = np.flatnonzero(segments_T == segment)
        assert (np.diff(place) == 1).all()
        tokens = batch["tokens"][row][place]
        targets = batch["targets"][row][place]
        assert (tokens[1:] == targets[:-1]).all()
        yield [*tokens.tolist(), int(targets[-1])], batch["weights"][row][place]


def test_rows_are_whole_episodes_and_weigh_what_the_policy_wrote() -> None:
    batch = make().train[0]
    for row in range(4):
        found = list(episodes(batch, row))
        assert len(found) >= 5  # of at most 96 tokens, in 512
        for tokens, weights in found:
            assert tokens[0] == FORM.bos and tokens[-1] == FORM.end
            assert (weights == FORM.policy_mask(tokens)[1:]).all()
            shown = FORM.show(tokens)
            assert shown.count("<assistant>say ") == 1
    # Rows end with padding without weight.
    padding = batch["segment_ids"] == 0
    assert padding.mean() < 0.2 and not batch["weights"][padding].any()


def test_lists_are_dealt_out_in_turn() -> None:
    batch = make().train[0]
    fields = [
        len(FORM.show(tokens).partition("<user>")[2].partition("<end>")[0].split()) - 1
        for tokens, _ in episodes(batch, 1)
    ]
    assert set(fields) == {1, 2}
    assert all(a != b for a, b in itertools.pairwise(fields))


def test_batches_are_a_pure_function_of_seed_and_step() -> None:
    data, again, other = (make(f"data.seed={seed}") for seed in (0, 0, 1))
    for step in (0, 7, 10**9):
        chex.assert_trees_all_equal(data.train[step], again.train[step])
    assert (data.train[0]["tokens"] != data.train[1]["tokens"]).any()
    assert (data.train[0]["tokens"] != other.train[0]["tokens"]).any()
    assert (data.validation[0]["tokens"] != data.train[0]["tokens"]).any()
    whole = data.train.rows(3, 0, 1)
    parts = [Reader(data.train, i, 4)[3] for i in range(4)]
    joined = {name: np.concatenate([p[name] for p in parts]) for name in whole}
    chex.assert_trees_all_equal(joined, whole)


def success(sources: str) -> float:
    """The share of the episodes of a batch that end well."""
    data = make(sources=sources)
    ended = []
    for row in range(4):
        for tokens, _ in episodes(data.train[0], row):
            shown = FORM.show(tokens)
            ended.append(answer_is_right(shown))
    assert len(ended) > 20
    return float(np.mean(ended))


def answer_is_right(shown: str) -> bool:
    """Follows the live tool through an episode of one look-up."""
    system, user = shown.split("<end>")[:2]
    live = system.split("live ")[1][:3]
    key, field = user.split("<user>")[1].split()
    told = shown.partition(f"<assistant>{live} {key} {field}<end>\n<tool>=")[2]
    return bool(told) and f"say {told[:2]}<end>" in shown


def test_skill_makes_imperfect_episodes() -> None:
    base = "episodes:tools:length=64:fails=0:distractors=2"
    assert success(base) == 1.0
    assert success(f"{base}:skill=0") == 0.0
    assert 0.1 < success(f"{base}:skill=0.3") < 0.5
    assert success(f"{base}:noise=0.5") == 1.0


def test_noise_that_does_not_fit_is_left_out() -> None:
    batch = make(
        sources="episodes:tools:difficulty=3:noise=1:length=128", seq_len=128
    ).train[0]
    assert (batch["segment_ids"].max(axis=1) == 1).all()


def test_validation_of_another_length() -> None:
    data = make(sources="episodes:tools:length=256", seq_len=256)
    longer = data.validation.at(512, 2)
    assert len(longer) == 2 and longer[0]["tokens"].shape == (2, 512)
    assert ((longer[0]["segment_ids"] > 0).sum(axis=1) > 400).all()
    assert data.validation.graded


def test_the_figures_of_a_run_on_episodes() -> None:
    data = make()
    assert data.summary["source"] == "tools:difficulty=1/2:length=96"
    assert 3.0 < data.summary["unigram_bits_per_byte"] < 6.0
    assert data.identity == {
        "tokenizer": "bytes-272",
        "source 0": "tools:difficulty=1/2:length=96",
    }


@pytest.mark.parametrize(
    ("sources", "match"),
    [
        ("episodes:tool", "did you mean 'tools'"),
        ("episodes:tools:length=1K", "length=1024, more than a row of .*seq_len=512"),
        ("episodes:tools:difficulty=9:length=64", "takes .* raise length to"),
        ("episodes:tools:skill=2", "skill=2.0: must be from 0 to 1"),
        (
            "episodes:tests.environments.faulty:Faulty:skill=0.5",
            "no method mistake",
        ),
    ],
)
def test_sources_that_cannot_be_are_named(sources: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        make(sources=sources)


def test_kinds_of_sources_do_not_mix() -> None:
    for other, kind in (("task:mqar", "a generated task"), ("a.txt", "text")):
        with pytest.raises(config_io.ConfigError, match=f"'{other}' is {kind}"):
            make(sources=f"{TOOLS},{other}")
    with pytest.raises(config_io.ConfigError, match="episodes have no strata"):
        make("data.strata=16")


def test_symbols_cannot_spell_episodes() -> None:
    with pytest.raises(UserError, match="no special token for end, system"):
        make("data.tokenizer=symbols:64")
