"""Policies written anew that know what is shown and nothing else.

They solve a task from the text of its turns, so that what an environment shows is
enough, and what its expert knows besides does not matter.
"""

import re
from collections.abc import Iterator

from kimi_jax.data.tokenizer import ByteTokenizer
from kimi_jax.environments import specs
from kimi_jax.environments.format import make_format

FORM = make_format(ByteTokenizer())


def made(text: str, seed: int = 0):
    """Environment and task of one spec."""
    (spec,) = specs.parse(text)
    return specs.make(spec, FORM), specs.task_of(spec, seed)


def texts(tokens: list[int]) -> list[str]:
    """The texts of turns, without roles; a turn that is only opened is left out."""
    shown = FORM.show(tokens).removeprefix("<bos>")
    found = re.findall(r"<(?:system|user|tool)>(.*?)<end>", shown, re.S)
    return [text.strip() for text in found]


def solve(name: str, environment, task) -> tuple[bool, int]:
    """Whether the reader of a family solves a task, and in how many turns."""
    policy = READERS[name](*texts(environment.reset(task)))
    said, turns = next(policy), 0
    while True:
        step = environment.step(FORM.close(said))
        turns += 1
        if step.done:
            return step.info["success"], turns
        said = policy.send(texts(step.tokens)[0])


def tools(system: str, user: str) -> Iterator[str]:
    live = re.search(r"\blive (\w+)", system)[1]
    key, *fields = user.split()
    for field in fields:
        while "=" not in (told := (yield f"{live} {key} {field}")):
            assert told == "busy"
        key = re.search(r"=(\w+)", told)[1]
    yield f"say {key}"


def documents(system: str, user: str) -> Iterator[str]:
    key, *relations = user.split(":")[-1].split()
    if "pages" not in user:
        *pages, question = user.split("\n")
        key, *relations = question.split()
    for relation in relations:
        if "pages" in user:
            last = (yield f"find {key} {relation}").split()[-1]
            pages = [(yield f"read {last}")]
        key = re.findall(rf"\b{key} {relation} (\w+)\.", "\n".join(pages))[-1]
    yield f"say {key}"


def rename(system: str, user: str) -> Iterator[str]:
    old, new = re.fullmatch(r"rename (\w+) to (\w+)", user).groups()
    while (told := (yield "run")) != "pass":
        file = told.split()[0]
        for line in (yield f"read {file}").split("\n"):
            number, text = line.split(" ", 1)
            if re.search(rf"\b{old}\b", text) and not text.startswith("#"):
                changed = re.sub(rf"\b{old}\b", new, text)
                assert (yield f"edit {file} {number} {changed}") == "ok"
    yield "submit"


def repair(system: str, user: str) -> Iterator[str]:
    for file in (yield "list").split():
        wanted = ""
        for line in (yield f"read {file}").split("\n"):
            number, text = line.split(" ", 1)
            if comment := re.fullmatch(r"# \w+ is (\w+) (.) (\d)", text):
                below, operator, by = comment.groups()
                below = below if below == "x" else f"{below}(x)"
                wanted = f"ret {below} {operator} {by}"
            elif text.startswith("ret") and wanted and text != wanted:
                yield f"edit {file} {number} {wanted}"
    yield "submit"


READERS = {"tools": tools, "documents": documents, "rename": rename, "repair": repair}
