"""Traces of chosen steps, by JAX's own profiler."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, Self

import jax

from kimi_jax.config import Monitor, profile_steps
from kimi_jax.errors import UserError


class Profiler:
    """Traces steps into `workdir/profile`; a context manager that ends a trace begun.

    A run that is interrupted while it is traced keeps what was traced.
    """

    def __init__(
        self, monitor: Monitor, workdir: pathlib.Path, note: Callable[[str], None]
    ):
        """`note` prints a line."""
        self._steps = profile_steps(monitor)
        self._folder = workdir / "profile"
        self._note = note
        self._tracing = False

    def around(self, step_fn: Callable[..., Any], finished: int) -> Callable[..., Any]:
        """`step_fn`, traced where it is to be; `finished` steps came before its first.

        Calls wait for the device where a trace begins or ends, and nowhere else.
        """
        chosen = self._steps
        if chosen is None:
            return step_fn
        if finished + 1 >= chosen.stop:
            self._note(f"profile: step {chosen[-1]} is past, nothing is traced")
            return step_fn
        step = finished

        def traced(*arguments: Any) -> Any:
            nonlocal step
            step += 1
            if step in chosen and not self._tracing:
                jax.block_until_ready(arguments)
                self._start()
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                result = step_fn(*arguments)
            if step == chosen[-1]:
                jax.block_until_ready(result)
                self._stop()
            return result

        return traced

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self) -> None:
        try:
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
        except RuntimeError as error:
            raise UserError(
                f"config.monitor.profile: the profiler does not start ({error}); end "
                "the other trace in this process, or leave the field empty"
            ) from error
        self._tracing = True

    def _stop(self) -> None:
        if not self._tracing:
            return
        self._tracing = False
        jax.profiler.stop_trace()
        self._note(
            f"profile written to {self._folder}; open it with `xprof --logdir="
            f"{self._folder}` (pip install xprof), or drop the perfetto_trace.json.gz "
            "in it on https://ui.perfetto.dev"
        )
