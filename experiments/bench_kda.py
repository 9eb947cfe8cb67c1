"""KDA: forward, forward + backward and decoding; ours, XLA and the peer.

Gate, l2norm and sigmoid run inside, on random data. Before anything is timed, each
implementation is compared with the recurrence in float32 on a short sequence.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from experiments import gpu_trace
from kimi_jax import hardware
from kimi_jax.errors import UserError
from pallas_kernels.kda import choose_implementation, kda, kda_step
from pallas_kernels.kda.gates import Inputs, Options
from pallas_kernels.kda.plan import Plan

SETTINGS: dict[str, Any] = {
    "lower_bound": -5.0,
    "use_gate_in_kernel": True,
    "use_qk_l2norm": True,
    "use_beta_sigmoid": True,
}
LARGEST_ERROR = 1e-2
# Sums over all tokens, which rounding hits harder.
LARGEST_ERROR_OF_SUMS = 4e-2
DECODE_STEPS = 100
# Per token and head, at widths of 128 in bfloat16. Bytes that a pass moves at least:
# reads q, k, v, g (twice and do), writes o and gradients. FLOPs of chunks of 64: 4 CK
# for A and P, 6 KV for the state, 4 CV for what those multiply; backward 2.5 times it.
LEAST_BYTES = {"forward": 1282, "forward+backward": 3846}
LEAST_FLOPS = {"forward": 164e3, "forward+backward": 574e3}


def run(config: ConfigDict) -> dict:
    """Returns the device, versions and one row a measurement."""
    platform = jax.default_backend()
    names = []
    for name in config.implementations:
        try:
            names.append(choose_implementation(name, platform)[0])
        except ValueError as error:
            print(f"skipped: {error}")
    if not names:
        raise UserError("no implementation of the config runs here")
    rows = []
    for row in _rows(names, config):
        if "ms" in row:
            said = f"{row['case']}, {row['implementation']}: {row['ms']:.4g} ms"
            print(said, flush=True)
        rows.append(row)
    return {
        "device": jax.devices()[0].device_kind,
        "versions": f"jax {jax.__version__}",
        "rows": rows,
    }


def _rows(names: list[str], config: ConfigDict) -> Iterator[dict]:
    yield from [check(name, config.width) for name in names]
    if config.peer:
        # Before ours: JAX keeps the memory that it once had, torch gives it back.
        yield from peer(config)
    for shape in config.shapes:
        for name in names:
            if name == "xla" and math.prod(shape) > config.largest_xla:
                continue
            yield from timed(name, shape, config)
    if "triton" in names:
        for shape in config.kernel_shapes:
            yield from kernels(shape, config)
    for batch in config.decode_batches:
        for name in names:
            yield from decode(name, batch, config)


def arrays(batch: int, length: int, heads: int, width: int) -> dict[str, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(0), 6))
    wide = (batch, length, heads, width)
    x = {n: jax.random.normal(next(keys), wide, jnp.bfloat16) for n in "qkvg"}
    x["beta"] = jax.random.normal(next(keys), wide[:3], jnp.bfloat16)
    x["A_log"] = jnp.zeros(heads)
    x["dt_bias"] = 0.1 * jax.random.normal(next(keys), (heads * width,))
    return x


def forward(
    x: dict[str, jax.Array],
    name: str,
    residuals: str = "all",
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    settings: dict[str, Any] = {**x, **SETTINGS, "residuals": residuals}
    return kda(**settings, segment_ids=segment_ids, implementation=name)[0]


def backward(x: dict[str, jax.Array], do: jax.Array, **settings: Any) -> Any:
    return jax.vjp(partial(forward, **settings), x)[1](do)


def check(name: str, width: int) -> dict:
    """Compares outputs and gradients with the recurrence; raises if they are off."""
    x = arrays(2, 300, 2, width)
    do = jax.random.normal(jax.random.key(1), x["v"].shape, jnp.bfloat16)

    def everything(x, do, name):
        o, vjp = jax.vjp(partial(forward, name=name), x)
        return o, vjp(do.astype(o.dtype))[0]

    got = jax.jit(partial(everything, name=name))(x, do)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (x, do))
    expected = jax.jit(partial(everything, name="reference"))(*wide)
    errors = jax.tree.map(
        lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)), got, expected
    )
    sums = max(errors[1].pop(key) for key in ("A_log", "dt_bias"))
    error = max(jax.tree.leaves(errors))
    if not (error < LARGEST_ERROR and sums < LARGEST_ERROR_OF_SUMS):
        raise UserError(f"{name} is wrong: relative errors {errors}, of sums {sums}")
    return {"case": "relative error", "implementation": name, "error": error}


def timed(name: str, shape: tuple[int, int, int], config: ConfigDict) -> Iterator[dict]:
    """Rows for the forward pass and for both passes of one shape.

    Where the config asks for it, also with each choice of residuals, and with the row
    cut into documents.
    """
    x = arrays(*shape, config.width)
    do = jax.random.normal(jax.random.key(1), x["v"].shape, jnp.bfloat16)
    for what, case, function, inputs in _cases(name, shape, config, x, do):
        row: dict[str, Any] = {"case": f"{case} {shape}", "implementation": name}
        # Ids among the inputs: as constants, XLA would work on them before the call.
        compiled = jax.jit(function).lower(**inputs).compile()
        memory = compiled.memory_analysis()
        call = partial(compiled, **inputs)
        ms = milliseconds(call, config.rounds, calls=config.calls)
        row |= {"ms": ms, **floor(what, math.prod(shape), ms)}
        if memory is not None:
            extra = memory.temp_size_in_bytes + memory.output_size_in_bytes
            row["extra GB"] = extra / 1e9
        if function.func is _layer:
            row["kept GB"] = _kept(x, **function.keywords) / 1e9
        yield row


def floor(what: str, pairs: int, ms: float) -> dict[str, float]:
    """Least bytes and FLOPs of the passes `what`, the time they imply, our share of it.

    Args:
      pairs: tokens times heads.
      ms: what the passes took.
    """
    moved, flops = LEAST_BYTES[what] * pairs, LEAST_FLOPS[what] * pairs
    found = {"GB": moved / 1e9, "TFLOP": flops / 1e12}
    card = hardware.look_up(jax.devices()[0].device_kind)
    if card is None:
        return found
    least = 1e3 * max(moved / card.bandwidth, flops / card.flops)
    return found | {"floor ms": least, "of floor": least / ms}


def _cases(
    name: str, shape: tuple[int, int, int], config: ConfigDict, x: Any, do: Any
) -> Iterator[tuple[str, str, partial, dict[str, Any]]]:
    """(passes, as a row calls them, the function, its inputs by name) to be timed."""
    inputs = {"forward": {"x": x}, "forward+backward": {"x": x, "do": do}}
    passes: dict[str, Callable[..., Any]] = {
        "forward": forward,
        "forward+backward": backward,
    }
    for what, function in passes.items():
        yield what, what, partial(function, name=name), inputs[what]
    if shape == config.residuals_shape:
        what = "forward+backward"
        for kept in ("all", "states", "none"):
            function = partial(_layer, name=name, residuals=kept)
            yield what, f"{what}, keeping {kept},", function, inputs[what]
    if shape == config.packed_shape:
        numbers = jnp.arange(1, 1 + len(config.packed))
        ids = jnp.repeat(numbers, jnp.array(config.packed))[None]
        for what, function in passes.items():
            packed = inputs[what] | {"segment_ids": ids}
            yield what, f"{what}, packed,", partial(function, name=name), packed


def _layer(x: Any, do: jax.Array, **settings: Any) -> Any:
    """Outputs and gradients: in a model the outputs are needed before the gradients."""
    o, pull = jax.vjp(partial(forward, **settings), x)
    return o, pull(do)


def _kept(x: Any, **settings: Any) -> int:
    """Bytes that wait for the backward pass, besides the inputs."""
    call = partial(forward, **settings)
    held = jax.eval_shape(lambda x: jax.vjp(call, x)[1], x)
    bytes_of = [a.size * a.dtype.itemsize for a in jax.tree.leaves(held)]
    return sum(bytes_of) - sum(a.nbytes for a in x.values())


def kernels(shape: tuple[int, int, int], config: ConfigDict) -> Iterator[dict]:
    """Rows for each Triton kernel alone, on what those before it make."""
    x = Inputs(**arrays(*shape, config.width))
    do = jax.random.normal(jax.random.key(1), x.v.shape, jnp.bfloat16)
    state = jnp.zeros((shape[0], shape[2], config.width, config.width))
    plan = Plan(
        x, None, Options(config.width**-0.5, allow_neg_eigval=False, **SETTINGS)
    )

    def run(name: str, function: Callable, *args: Any) -> tuple[Any, dict]:
        call = partial(jax.jit(function), *args)
        ms = milliseconds(call, config.rounds, calls=config.calls)
        row = {"case": f"{name} alone {shape}", "implementation": "triton", "ms": ms}
        return call(), row

    chunks, row = run("intra", lambda x: plan.intra(x, None), x)
    yield row
    scan = partial(plan.scan, passes=None, state=state)
    _, row = run("scan", lambda x, c: scan(x, chunks=c, save=False), x, chunks)
    yield row
    keep = "scan, keeping states,"
    made, row = run(keep, lambda x, c: scan(x, chunks=c, save=True), x, chunks)
    yield row
    o, s, x_kept, _ = made
    reverse = partial(plan.reverse, None, None, dstate=state)
    made, row = run("reverse", lambda c, do: reverse(chunks=c, do=do), chunks, do)
    yield row
    dr, ds, _ = made
    pairs, row = run("pairs", plan.pairs, x, None, chunks.b, do, o, x_kept, dr)
    yield row
    yield run("grads", plan.grads, x, None, chunks, s, x_kept, do, dr, ds, pairs)[1]


def decode(name: str, batch: int, config: ConfigDict) -> Iterator[dict]:
    """Rows for one call a token, and for many tokens in one call; state in place.

    "card ms" is how long the card is busy, without what JAX takes to call it.
    """
    x = arrays(batch, 1, config.decode_heads, config.width)
    x = {n: a[:, 0] if a.ndim > 2 else a for n, a in x.items()}
    shape = (batch, config.decode_heads, config.width, config.width)

    def step(v, state):
        return kda_step(**{**x, "v": v}, state=state, implementation=name, **SETTINGS)

    def steps(v, state):
        def body(_, carry):
            return step(*carry)

        # The loop counts in a kernel of its own; not after each token.
        return jax.lax.fori_loop(0, DECODE_STEPS, body, (v, state), unroll=10)

    for what, function, count in (
        ("decode", step, 1),
        (f"decode {DECODE_STEPS} tokens,", steps, DECODE_STEPS),
    ):
        compiled = jax.jit(function, donate_argnums=1)
        carried = [x["v"], jnp.zeros(shape)]

        def run(compiled=compiled, carried=carried):
            # The state is given away, so the next call takes the one that came back.
            o, carried[1] = compiled(carried[0], carried[1])
            return o

        ms = milliseconds(run, config.rounds, calls=config.calls) / count
        case = f"{what} batch {batch}"
        row = {"case": case, "implementation": name, "ms": ms}
        _, devices = gpu_trace.trace(lambda: [run() for _ in range(config.calls)])
        for kernels in devices:
            row["card ms"] = 1e-6 * gpu_trace.busy(kernels) / (count * config.calls)
        yield row


def milliseconds(call: Callable, rounds: int, *, calls: int = 1) -> float:
    """Median over rounds of the mean time of calls sent one after the other.

    A call before them is not timed.
    """
    result = jax.block_until_ready(call())
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(calls):
            del result  # there may be no room for two
            result = call()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - started) / calls)
    return 1e3 * statistics.median(times)


def peer(config: ConfigDict) -> Iterator[dict]:
    """flash-linear-attention on the same kind of data, if it is there."""
    try:
        import torch
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
        from triton.testing import do_bench
    except ImportError as error:
        print(f"peer skipped: {error}")
        return
    if not torch.cuda.is_available():
        print("peer skipped: torch sees no GPU")
        return
    measure = partial(do_bench, return_mode="median")
    for shape in config.shapes:
        for what in ("forward", "forward+backward"):
            row = {"case": f"{what} {tuple(shape)}", "implementation": "fla"}
            try:
                call = peer_call(chunk_kda, shape, config.width, what)
                call()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                call()
                extra = (torch.cuda.max_memory_allocated() - before) / 1e9
                yield {**row, "ms": measure(call), "extra GB": extra}
            except torch.OutOfMemoryError:
                print(f"peer skipped: {row['case']} does not fit in memory")
            torch.cuda.empty_cache()
    for batch in config.decode_batches:
        shape = (batch, 1, config.decode_heads)
        call = peer_call(fused_recurrent_kda, shape, config.width, "decode")
        case = f"decode batch {batch}"
        yield {"case": case, "implementation": "fla", "ms": measure(call)}


def peer_call(function: Callable, shape: Any, width: int, what: str) -> Callable:
    """A call of one of fla's functions on new random data, without arguments."""
    import torch

    batch, length, heads = shape
    wide = (batch, length, heads, width)
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    half["requires_grad"] = what == "forward+backward"
    x = {n: torch.randn(wide, **half) for n in "qkvg"}
    x["beta"] = torch.randn(wide[:3], **half)
    settings: dict[str, Any] = {
        "A_log": torch.zeros(heads, device="cuda"),
        "dt_bias": 0.1 * torch.randn(heads * width, device="cuda"),
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": -5.0,
    }
    if what == "decode":
        state = torch.zeros(batch, heads, width, width, device="cuda")
        settings |= {"initial_state": state, "output_final_state": True}
    else:
        settings["safe_gate"] = True
    do = torch.randn_like(x["v"])

    def both():
        o, _ = function(**x, **settings)
        torch.autograd.grad(o, list(x.values()), do)

    def only():
        with torch.inference_mode():
            function(**x, **settings)

    return both if what == "forward+backward" else only
