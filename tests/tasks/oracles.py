"""Solvers that know the rules of each task, and nothing of how instances are made.

Each reads an instance as a model would and says the answers, in order.
"""

import itertools
import re
from collections import Counter

import numpy as np

from kimi_jax.data.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def mqar(tokens, where):
    """Pairs stand first, until a key comes again."""
    pairs, at = {}, 0
    while tokens[at] not in pairs and at not in where:
        pairs[tokens[at]] = tokens[at + 1]
        at += 2
    return [pairs[tokens[t]] for t in where]


def copy(tokens, where):
    items = list(itertools.takewhile(lambda t: t < max(tokens) - 1, tokens))
    return items[: len(where)]


def palindrome(tokens, where):
    return copy(tokens, where)[::-1]


def stack(tokens, where):
    held, found = {}, []
    for at in range(0, len(tokens), 3):
        operation, name, *element = tokens[at : at + 3]
        if operation == 0:
            held.setdefault(name, []).extend(element)  # the last push may be cut
        else:
            found.append(held[name].pop())
    return found


def permutations(tokens, where):
    """By products of permutation matrices: column i has its one where i goes."""
    items = next(n for n in range(2, 7) if max(tokens) < np.prod(range(1, n + 1)))
    ordered = sorted(itertools.permutations(range(items)))
    moves = [np.eye(items, dtype=int)[list(p)].T for p in ordered]
    state, found = np.eye(items, dtype=int), []
    for token in tokens:
        state = moves[token] @ state
        found.append(next(n for n, m in enumerate(moves) if (m == state).all()))
    return found


def needle(prompt, text):
    facts = re.findall(r"The magic number of ([a-z ]+) is (\d+)\. ", prompt)
    asked = re.findall(r"\nThe magic numbers? of ([a-z ]+), in order:", text)
    return [value for key in asked for name, value in facts if name == key]


def variables(prompt, text):
    value = re.findall(r"\nThe variables that hold (\d+), in order:", prompt)[0]
    holds = {}
    for name, source in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\. ", prompt):
        holds[name] = holds.get(source, source)
    return [name for name, held in holds.items() if held == value]


def common_words(prompt, text):
    counts = Counter(_list(prompt))
    top = max(counts.values())
    return sorted(word for word, n in counts.items() if n == top)


def frequent_words(prompt, text):
    return [word for word, _ in Counter(_list(prompt)).most_common()]


def questions(prompt, text):
    born = dict(re.findall(r"Document: (\w+ \w+) was born in (\w+) and", prompt))
    works = dict(re.findall(r"Document: (\w+ \w+) was .*? at (\w+)\. ", prompt))
    seats = dict(re.findall(r"The workshop of (\w+) is in (\w+)\. ", prompt))
    question = prompt[prompt.rindex("\nQuestion and answer:") :]
    if person := re.search(r"answer: (\w+ \w+) was born in$", question):
        return [born[person[1]]]
    return [seats[works[re.search(r"workshop where (\w+ \w+) works", question)[1]]]]


def _list(prompt):
    return prompt.split("\n")[1].split()


SYMBOLS = {f.__name__: f for f in (mqar, copy, palindrome, stack, permutations)}
TEXTS = {
    f.__name__: f for f in (variables, common_words, frequent_words, questions, needle)
} | dict.fromkeys(("needle_keys", "needle_values", "needle_queries"), needle)


def solve(name, example):
    """(answers of the solver, answers of the instance), both as lists."""
    where = np.flatnonzero(example.asked_T).tolist()
    tokens = example.tokens_T.tolist()
    if name in SYMBOLS:
        return SYMBOLS[name](tokens, where), example.labels_T[where].tolist()
    text = TOKENIZER.decode([*tokens, int(example.labels_T[-1])])
    # <bos> is no character.
    prompt = text[: where[0]]
    numbers = example.answers_T[where]
    given = [
        TOKENIZER.decode(example.labels_T[where][numbers == n]).strip()
        for n in dict.fromkeys(numbers.tolist())
    ]
    return TEXTS[name](prompt, text)[: len(given)], given
