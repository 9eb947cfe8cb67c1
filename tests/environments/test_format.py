"""Roles and ends as tokens: round trips, masks, tokenizers without them."""

import json
from pathlib import Path

import pytest

from kimi_jax.data.tokenizer import ByteTokenizer, SymbolTokenizer
from kimi_jax.data.tokenizer_files import load_tokenizer
from kimi_jax.environments.format import NAMES, ROLES, BadTurn, make_format
from kimi_jax.errors import UserError
from tests.data import tokenizer_cases
from tests.environments.readers import FORM


def test_ids_of_the_byte_tokenizer_do_not_change() -> None:
    # Checkpoints have learned them.
    assert (FORM.bos, FORM.end) == (257, 259)
    assert [FORM.roles[role] for role in ROLES] == [260, 261, 262, 263]
    assert ByteTokenizer().specials["<eod>"] == 258


@pytest.mark.parametrize("text", ["", "get k7 a", "<end><tool>", "木\n\x00", "<bos>"])
def test_text_survives_and_spells_no_role(text: str) -> None:
    turn = FORM.render("tool", text)
    assert turn[0] == FORM.roles["tool"] and turn[-1] == FORM.end
    assert max(turn[1:-1], default=0) < 256
    assert FORM.text_of(turn) == text
    assert FORM.read(FORM.close(text)) == text


def test_turns_that_cannot_be_read() -> None:
    for turn in ([], [65], [FORM.end, 65], [FORM.bos, 65, FORM.end], [262, FORM.end]):
        with pytest.raises(BadTurn):
            FORM.read(turn)
    for outside in (-1, 272, 10**30, "x", None):
        with pytest.raises(BadTurn, match="invalid token"):
            FORM.read([outside, FORM.end])


def test_the_mask_follows_from_the_tokens() -> None:
    prompt = [FORM.bos, *FORM.render("user", "hi"), *FORM.open("assistant")]
    first, second = FORM.close("get"), FORM.close("say")
    told = [*FORM.render("tool", "x"), *FORM.open("assistant")]
    mask = FORM.policy_mask([*prompt, *first, *told, *second])
    wanted = [0] * len(prompt) + [1] * 4 + [0] * len(told) + [1] * 4
    assert mask.tolist() == wanted
    # A turn that was cut short ends where the next role begins.
    assert FORM.policy_mask([*prompt, 65, 66, *told, 67]).tolist() == (
        [0] * len(prompt) + [1, 1] + [0] * len(told) + [1]
    )
    assert FORM.policy_mask([]).tolist() == []


def test_conversations_are_shown_line_by_line() -> None:
    tokens = [FORM.bos, *FORM.render("user", "hi"), *FORM.open("assistant"), 65]
    assert FORM.show(tokens) == "<bos>\n<user>hi<end>\n<assistant>A"


def write_tokenizer(folder: Path, specials: list[str]) -> str:
    """A tiktoken file some of whose unused ids are named."""
    name = tokenizer_cases.write_tiktoken(folder / "x")
    beside = Path(name).with_name("tokenizer_config.json")
    settings = json.loads(beside.read_text())
    named = settings["added_tokens_decoder"]
    free = (i for i in range(min(map(int, named)), 10**6) if str(i) not in named)
    named |= {str(next(free)): {"content": special} for special in specials}
    beside.write_text(json.dumps(settings))
    return name


def test_special_tokens_of_a_tokenizer_file(tmp_path: Path) -> None:
    names = [options[0] for options in NAMES.values()]
    form = make_format(load_tokenizer(write_tokenizer(tmp_path, names)))
    assert len({form.bos, form.end, *form.roles.values()}) == 6
    turn = form.render("tool", "=k7 <|im_end|>")
    assert form.text_of(turn) == "=k7 <|im_end|>" and turn.count(form.end) == 1
    assert form.read(form.close("say k7")) == "say k7"


def test_a_tokenizer_without_roles_is_refused_with_the_fix(tmp_path: Path) -> None:
    some = load_tokenizer(write_tokenizer(tmp_path, ["<|im_end|>", "<system>"]))
    with pytest.raises(UserError, match=r"for user, assistant, tool; .*'<tool>'"):
        make_format(some)
    with pytest.raises(UserError, match="tokenizer=bytes"):
        make_format(SymbolTokenizer(20))
