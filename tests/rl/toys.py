"""An environment that pays a policy which has learned nothing, for tests."""

from collections.abc import Sequence

from kimi_jax.environments.environment import Step, Task
from kimi_jax.environments.format import Format


class Even:
    """Two turns; the reward is the share of even tokens in them."""

    def __init__(self, form: Format):
        self._form = form

    def reset(self, task: Task) -> list[int]:
        self._even = self._drawn = self._turn = 0
        asked = self._form.render("user", f"{task.seed % 100}")
        return [self._form.bos, *asked, *self._form.open("assistant")]

    def step(self, tokens: Sequence[int]) -> Step:
        self._turn += 1
        self._drawn += len(tokens)
        self._even += sum(token % 2 == 0 for token in tokens)
        if self._turn == 1:
            answer = self._form.render("tool", "go on")
            return Step([*answer, *self._form.open("assistant")], 0.0, False, {})
        share = self._even / max(self._drawn, 1)
        return Step([], share, True, {"success": share > 0.5})

    def expert(self) -> list[int]:
        return self._form.close("bd")
