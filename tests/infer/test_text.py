"""Text as it comes, prompts in files, conversations."""

import json

import pytest

from kimi_jax.data.tokenizer import ByteTokenizer
from kimi_jax.errors import UserError
from kimi_jax.infer.batch_file import Answers, read_prompts
from kimi_jax.infer.chat import load_chat
from kimi_jax.infer.text import TextStream

TOKENS = ByteTokenizer()


def shown(text, size, stops=()):
    stream, tokens = TextStream(TOKENS, stops), list(text.encode())
    pieces = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    return [stream.add(p, last=p is pieces[-1]) for p in pieces]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stream_shows_whole_characters_once(size):
    pieces = shown("né → 日本", size)
    assert "".join(pieces) == "né → 日本" and "\ufffd" not in "".join(pieces[:-1])


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stop_string_is_never_shown(size):
    assert "".join(shown("one ENter END two", size, ("END",))) == "one ENter "
    assert "".join(shown("one EN", size, ("END",))) == "one EN"
    assert TextStream(TOKENS, ("END",)).ended(list(b"an END"))


def test_answers_go_on_after_a_kill(tmp_path):
    file = tmp_path / "answers.jsonl"
    with Answers(file) as answers:
        answers.write({"line": 2, "text": "b"})
    with file.open("a") as cut_short:
        cut_short.write('{"line": 1, "te')
    with Answers(file) as answers:
        assert answers.done == {2}
        answers.write({"line": 1, "text": "a"})
    assert [json.loads(x)["text"] for x in file.read_text().splitlines()] == ["b", "a"]
    file.write_text("notes\n")
    with pytest.raises(UserError, match="something else than answers"):
        Answers(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"prompt": "a", "messages": []}', "line 1: write"),
        ('{"prompt": "a", "heat": 1}', "line 1: unknown 'heat'; there are id"),
        ('{"prompt": 3}', "line 1: prompt=3: must be a string"),
        ('{"messages": ["hi"]}', "must be a list of objects"),
        ('{"prompt": "a", "max_tokens": 1.5}', "max_tokens=1.5: must be an integer"),
        ('{"prompt": "a", "top_p": "1"}', 'top_p="1": must be a number'),
        ('{"prompt": "a", "stop": 5}', "stop=5: must be a string or a list of"),
        ("\n", "no prompts in it"),
        (b"\xff", "is not UTF-8 text"),
    ],
)
def test_unfit_files_of_prompts_are_refused(tmp_path, text, message):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        read_prompts(file)


def test_a_line_ends_where_it_ends(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\r\n', encoding="utf-8", newline="")
    assert read_prompts(file) == [{"prompt": "a\u2028b", "line": 1}]


@pytest.fixture
def folder(tmp_path):
    settings = {
        "added_tokens_decoder": {"259": {"content": "<|user|>"}},
        "eos_token": {"content": "<|end|>"},
        "chat_template": "{% for m in messages %}<|user|>{{ m.content }}{{ eos_token }}"
        "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    added = {"added_tokens": [{"id": 260, "content": "<|end|>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(added))
    ends = {"eos_token_id": [260, 258]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    return tmp_path


def test_a_conversation_is_written_by_the_folders_template(folder):
    chat = load_chat(folder)
    text = chat.render([{"role": "user", "content": "hi"}])
    assert text == "<|user|>hi<|end|>>" and chat.ends == (260, 258)
    assert chat.encode(text, TOKENS) == [259, *b"hi", 260, *b">"]
    with pytest.raises(UserError, match="the chat template refuses: no tools"):
        chat.render([{"role": "tool", "content": ""}])


def test_templates_run_in_a_sandbox(folder):
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (folder / "chat_template.jinja").write_text(escape)
    with pytest.raises(UserError, match="the chat template refuses: access to attr"):
        load_chat(folder).render([])


def test_without_a_template_messages_are_refused(tmp_path):
    chat = load_chat(tmp_path)
    assert chat.encode("<|user|>", TOKENS) == list(b"<|user|>")
    with pytest.raises(UserError, match="there is no chat template"):
        chat.render([])
