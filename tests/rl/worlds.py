"""Small environments, and a model to act in them that compiles fast."""

import numpy as np

from kimi_jax.environments.environment import Step, Task
from kimi_jax.errors import UserError
from kimi_jax.infer.generator import Generator
from tests import tiny

SETTINGS = {
    "length": 96,
    "page_size": 4,
    "read_chunk": 16,
    "decode_steps": 4,
    "routes": True,
}
END = 7  # the token that ends a turn


def config(*overrides):
    """A layer of KDA and one of MLA, one of them with experts."""
    return tiny.make(
        "model.num_layers=2",
        "model.attention=kda,mla",
        "model.ffn.num_dense_layers=1",
        "model.residual.block_size=1",
        *overrides,
    )


def generator(slots, **settings):
    model = config().model
    variables = settings.pop("variables", None) or tiny.variables(model)
    return Generator(model, variables, **{**SETTINGS, "slots": slots, **settings})


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(8, 256, count).tolist()


class Echo:
    """Answers with tokens that depend on the turn, `difficulty` times.

    The prompt has `length` tokens. The reward is 0.25 a turn and, at the end, the
    share of even tokens in the last turn.
    """

    def reset(self, task):
        self.task, self.turn = task, 0
        return tokens(task.length, task.seed)

    def step(self, tokens):
        self.turn += 1
        if self.turn == self.task.difficulty:
            even = float(np.mean(np.asarray(tokens) % 2 == 0))
            return Step([], 0.25 + even, True, {"success": even > 0.5})
        rng = np.random.default_rng((sum(tokens), self.turn))
        answer = rng.integers(8, 256, 1 + 4 * self.turn).tolist()
        return Step(answer, 0.25, False, {"seen": np.int64(self.turn)})

    def expert(self):
        return [2, END]


class Broken(Echo):
    """Fails in the way that `difficulty` says, in the first turn or before."""

    def reset(self, task):
        if task.difficulty == 0:
            raise RuntimeError("no such world")
        if task.difficulty == 1:
            return [*super().reset(task), 400]
        return super().reset(task)

    def step(self, tokens):
        how = self.task.difficulty
        if how == 2:
            raise ZeroDivisionError("the world ends")
        answers = {
            3: Step([3, 9999], 0.5, False, {}),
            4: Step([3], float("nan"), False, {}),
            5: Step([], 0.5, False, {}),
            6: None,
        }
        return answers[how]


def make(task):
    if task.environment == "broken" and task.difficulty == 7:
        raise UserError("no such task")
    return {"echo": Echo, "broken": Broken}[task.environment]()


def tasks(*shapes, environment="echo"):
    """Of (turns, tokens of the prompt) each."""
    return [Task(environment, turns, n, 10 + i) for i, (turns, n) in enumerate(shapes)]
