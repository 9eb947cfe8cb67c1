"""Generated tasks: every instance is solved by an independent solver, none changes."""

import numpy as np
import pytest

from kimi_jax.data.tokenizer import ByteTokenizer, SymbolTokenizer
from kimi_jax.errors import UserError
from kimi_jax.tasks import specs
from kimi_jax.tasks.example import Example, digest, draw
from kimi_jax.tasks.text import Corpus, Prose, Text, sentences_of
from tests.tasks import oracles

TEXT = Text(ByteTokenizer(), Prose())

# Of 8 instances of each task with its own dials. A change of one means that results
# measured before compare with none that are measured after.
DIGESTS = {
    "mqar": "e94f88b59b6dd760",
    "copy": "90d87c3fd2e2d390",
    "palindrome": "a615a833f2b7fa41",
    "stack": "ce98453f456def2d",
    "permutations": "bf965ce0a9049e38",
    "needle": "7cc57e82a04dda71",
    "needle_keys": "9d36cc65f1418c90",
    "needle_values": "beeca96447558c49",
    "needle_queries": "5d7ae48d70c3eb11",
    "variables": "78302d3ca383df21",
    "common_words": "be6fb6b55bcfffe5",
    "frequent_words": "bf4e27d2e8304bb6",
    "questions": "f8b033312a7b9ac6",
}

DIALS = [
    *specs.TASKS,
    "mqar:length=31:pairs=8",
    "mqar:length=300:pairs=1:symbols=2",
    "copy:length=40:items=20:symbols=1",
    "palindrome:length=33:items=5",
    "stack:length=5:stacks=1:symbols=1",
    "stack:length=200:stacks=64:symbols=32",
    "permutations:items=2/3/4:length=40",
    "needle:length=256/1K:depth=0/0.5/1:digits=2",
    "needle_queries:keys=16:queries=3:values=2:length=3K",
    "variables:length=700:chains=1:hops=0",
    "variables:length=3K:chains=4:hops=6",
    "common_words:length=600:words=2:often=6:seldom=1",
    "frequent_words:length=2K:words=5:alpha=1.5",
    "questions:length=3K:people=9:hops=1/2",
]


def task_of(text: str, context: Text = TEXT, **defaults):
    (spec,) = specs.parse(text)
    return specs.make(spec, context, **defaults)


@pytest.mark.parametrize("text", DIALS)
def test_an_independent_solver_finds_every_answer(text: str) -> None:
    for spec in specs.parse(text):
        task = specs.make(spec, TEXT)
        for index in range(12):
            example = draw(task, 0, "training", index)
            found, given = oracles.solve(spec.name, example)
            assert found == given and given, (str(spec), index)
            size = len(example.tokens_T)
            assert size <= task.length
            assert all(len(x) == size and x.dtype == np.int32 for x in example)
            assert example.tokens_T.min() >= 0 and example.labels_T.min() >= 0
            assert max(example.tokens_T.max(), example.labels_T.max()) < task.vocab_size


@pytest.mark.parametrize("name", [n for n in specs.TASKS if n != "permutations"])
def test_labels_are_the_next_tokens(name: str) -> None:
    example = draw(task_of(name), 0, "training", 0)
    asked_T = example.asked_T[:-1]
    np.testing.assert_array_equal(
        example.labels_T[:-1][asked_T], example.tokens_T[1:][asked_T]
    )


@pytest.mark.parametrize("name", specs.TASKS)
def test_instances_are_what_they_were(name: str) -> None:
    task = task_of(name)
    assert digest(draw(task, 0, "evaluation", i) for i in range(8)) == DIGESTS[name]


def test_an_instance_depends_on_seed_stream_and_index_alone() -> None:
    task = task_of("needle_keys")
    first = draw(task, 3, "training", 10**12)
    draw(task, 3, "training", 5)
    assert digest([first]) == digest([draw(task, 3, "training", 10**12)])
    others = [(4, "training", 10**12), (3, "validation", 10**12), (3, "training", 1)]
    assert len({digest([draw(task, *key)]) for key in others} | {digest([first])}) == 4


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_a_needle_lies_at_its_depth(depth: float) -> None:
    task = task_of(f"needle:length=8K:depth={depth}")
    text = oracles.TOKENIZER.decode(draw(task, 0, "training", 0).tokens_T)
    body = text[text.index("\n") + 1 : text.rindex("\n")]
    place = body.index("The magic number") / (
        len(body) - len("The magic number of x is")
    )
    assert place == pytest.approx(depth, abs=0.02)


def test_long_instances_are_filled() -> None:
    example = draw(task_of("needle:length=1M"), 0, "training", 0)
    assert 2**20 - 100 < len(example.tokens_T) <= 2**20


def test_filler_may_be_real_text() -> None:
    sentences = sentences_of(b"To be,\nor not   to be. That is! Is it? Yes")
    assert sentences == [b"To be, or not to be. ", b"That is! ", b"Is it? ", b"Yes "]
    task = task_of("needle:length=400", Text(ByteTokenizer(), Corpus(sentences)))
    text = oracles.TOKENIZER.decode(draw(task, 0, "training", 0).tokens_T)
    assert "That is! Is it? Yes To be, or not to be. " in text
    with pytest.raises(UserError, match="holds no sentence"):
        Corpus([])


def test_answers_are_counted_apart_from_labels() -> None:
    example = draw(task_of("needle_values:digits=3"), 0, "training", 0)
    numbers, sizes = np.unique(example.answers_T, return_counts=True)
    assert numbers.tolist() == [-1, 0, 1, 2, 3]
    assert sizes[1:].tolist() == [4] * 4  # a space and three digits


def test_lists_of_values_are_a_grid() -> None:
    found = specs.parse_list("needle:length=1K/4K:depth=0/0.5/1,mqar")
    assert [str(spec) for spec in found][:2] == [
        "needle:length=1024:depth=0.0",
        "needle:length=1024:depth=0.5",
    ]
    assert len(found) == 7
    assert [s.name for s in specs.parse("state:length=9")] == ["stack", "permutations"]
    assert len(specs.parse("ruler:length=4K/8K")) == 16


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("mqra", "'mqra' does not exist; did you mean 'mqar'"),
        ("mqar:pair=3", "'pair' is no dial of mqar; did you mean 'pairs'"),
        ("mqar:pairs", "'pairs' is no dial"),
        ("mqar:pairs=2.5", "pairs='2.5' is not a whole number"),
        ("mqar:pairs=many", "not a whole number"),
        ("recall:stacks=3", "'stacks' is no dial of mqar"),
        ("mqar,mqar", "named twice"),
    ],
)
def test_a_wrong_spec_is_named(text: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        specs.parse_list(text)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("mqar:pairs=40", "pairs=40: must be from 1 to symbols / 2 = 32"),
        ("mqar:symbols=5", "symbols=5: must be even"),
        ("mqar:pairs=8:length=30", "pairs=8 takes at least 31 tokens; raise length"),
        ("copy:items=40", "items=40 takes at least 80 tokens"),
        ("copy:items=0", "items=0: must be at least 1"),
        ("stack:stacks=0", "stacks=0: must be at least 1"),
        ("permutations:items=7", "items=7: must be from 2 to 6"),
        ("mqar:symbols=1024", "1025 symbols, the tokenizer 'bytes' has room for 256"),
        ("needle:length=64", "length=64: the task alone takes .* raise length to 256"),
        ("needle:depth=2", "depth=2.0: from 0"),
        ("needle_keys:queries=9", "queries=9: must be from 1 to keys=4"),
        ("needle_keys:digits=1", "too few for different values"),
        ("common_words:seldom=20", "1 <= seldom < often"),
        ("frequent_words:length=200", "too short to tell the 3 most"),
        ("questions:hops=3", "hops=3: must be 1 or 2"),
        ("variables:length=128", "raise length to 512"),
    ],
)
def test_dials_that_do_not_fit_are_named_with_the_fix(text: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        task_of(text)


def test_symbols_are_no_text() -> None:
    with pytest.raises(UserError, match="cannot spell"):
        task_of("needle", Text(SymbolTokenizer(64), Prose()))
    assert task_of("mqar", Text(SymbolTokenizer(65), Prose())).vocab_size == 65


def test_digest_tells_instances_apart() -> None:
    one = Example(*(np.array(x, np.int32) for x in ([1, 2], [0, 3], [-1, 0])))
    assert digest([one]) != digest([one, one])
    assert digest([one]) != digest([one._replace(labels_T=one.labels_T[::-1])])
