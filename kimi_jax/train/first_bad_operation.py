"""The first operation of a function that makes something that is not finite.

The function's jaxpr is evaluated under `jit` with a flag beside each operation, so a
search is one program and works on sharded arrays of any size.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from kimi_jax import distributed

# Operations that only call a jaxpr of their own, which is looked into. Loops are not:
# they count as one operation.
_CALLS = {"jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint"}
_OURS = ("kimi_jax", "pallas_kernels")


def first_bad_operation(function: Callable[..., Any], *args: Any) -> str | None:
    """ "dot_general at kimi_jax/modules/kda.py:84 (_decay)", or None.

    Bad is what makes a NaN from inputs without one, or +inf from finite inputs. -inf is
    how masks are written.
    """
    closed = jax.make_jaxpr(function)(*args)
    equations: list[Any] = []

    def flags(*leaves: Any) -> jax.Array:
        found: list[jax.Array] = []
        equations.clear()
        _evaluate(closed.jaxpr, closed.consts, leaves, equations, found)
        return jnp.stack(found)

    bad = np.flatnonzero(distributed.whole(jax.jit(flags)(*jax.tree.leaves(args))))
    return _describe(equations[bad[0]]) if len(bad) else None


def _evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    equations: list[Any],
    flags: list[jax.Array],
) -> list[Any]:
    names = (*jaxpr.constvars, *jaxpr.invars)
    values = dict(zip(names, (*consts, *inputs), strict=True))

    def read(variable: Any) -> Any:
        is_literal = isinstance(variable, core.Literal)
        return variable.val if is_literal else values[variable]

    for equation in jaxpr.eqns:
        given = [read(variable) for variable in equation.invars]
        inner = _called(equation)
        if inner is not None:
            results = _evaluate(inner.jaxpr, inner.consts, given, equations, flags)
        else:
            params = equation.primitive.get_bind_params(equation.params)
            with equation.ctx.manager:
                results = equation.primitive.bind(*given, **params)
            if not equation.primitive.multiple_results:
                results = [results]
            equations.append(equation)
            flags.append(_goes_bad(given, results))
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _called(equation: Any) -> Any:
    """The closed jaxpr that `equation` calls, if that is all it does."""
    if equation.primitive.name not in _CALLS:
        return None
    inner = equation.params.get("call_jaxpr", equation.params.get("jaxpr"))
    return inner if hasattr(inner, "consts") else core.ClosedJaxpr(inner, ())


def _goes_bad(given: Sequence[Any], results: Sequence[Any]) -> jax.Array:
    has_nan = _any(jnp.isnan, given)
    new_nan = _any(jnp.isnan, results) & ~has_nan
    new_inf = _any(jnp.isposinf, results) & ~has_nan & ~_any(jnp.isinf, given)
    return new_nan | new_inf


def _any(test: Callable[[Any], jax.Array], values: Sequence[Any]) -> jax.Array:
    floats = [x for x in values if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    return jnp.any(jnp.array([False, *(jnp.any(test(x)) for x in floats)]))


def _describe(equation: Any) -> str:
    name = equation.primitive.name
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        parts = pathlib.Path(frame.file_name).parts
        home = next((i for i, part in enumerate(parts) if part in _OURS), None)
        if home is not None and parts[-1] != pathlib.Path(__file__).name:
            place = f"{'/'.join(parts[home:])}:{frame.line_num}"
            return f"{name} at {place} ({frame.function_name.rsplit('.', 1)[-1]})"
    return str(name)
