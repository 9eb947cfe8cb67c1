"""Chunked KDA in Triton kernels, with its own backward pass.

    intra    per chunk: decay factors, A, P                        (parallel)
    scan     per head: states and outputs                          (serial in time)
    reverse  per head: gradients of the states, last to first      (serial in time)
    grads    per chunk: gradients by the raw inputs                (parallel)

The algebra is that of `xla.py`; `gpu/` holds the kernels. Saved for the backward pass:
the raw inputs, the state that enters each chunk, named "kda_states", and the chunk
tensors, named "kda_matrices", for remat policies. Triton is imported inside functions
alone: other devices do not need it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.kda.gates import Inputs, Options
from pallas_kernels.kda.segments import Runs

Array = jax.Array

WIDTHS = (16, 32, 64, 128)
# Tokens whose decay one float32 exponent can hold, see `gpu.tiles`.
WIDE = 32


class Chunks(NamedTuple):
    """Tiles a, p [N,C,C]; qp, kb, kr [N,C,K]; vectors gam [N,K], b [N,C].

    N counts batch rows, chunks and value heads, the last fastest.
    """

    a: Array
    p: Array
    qp: Array
    kb: Array
    kr: Array
    gam: Array
    b: Array


class Residuals(NamedTuple):
    """What the backward pass needs; s [N,V,K] are states, transposed; x [N,C,V]."""

    inputs: Inputs
    codes: Array | None
    chunks: Chunks
    s: Array
    x: Array


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def kda_triton(
    inputs: Inputs, initial_state_BHKV: Array, runs: Runs | None, options: Options
) -> tuple[Array, Array]:
    """Runs KDA over all tokens, `options.chunk_size` at a time but at most 64.

    Args:
      inputs: raw inputs, at least one token.
      initial_state_BHKV: state [B,HV,K,V], float32.
      runs: documents of each row, or None for one document per row.
      options: static settings.

    Returns:
      o [B,T,HV,V] in v's dtype, and the final state.
    """
    return _forward(inputs, initial_state_BHKV, _codes(runs), options, False)[0]


def _save(inputs, initial_state_BHKV, runs, options):
    codes = _codes(runs)
    outputs, (chunks, s, x) = _forward(inputs, initial_state_BHKV, codes, options, True)
    chunks = Chunks(*(checkpoint_name(x, "kda_matrices") for x in chunks))
    s, x = (checkpoint_name(y, "kda_states") for y in (s, x))
    return outputs, Residuals(inputs, codes, chunks, s, x)


def _differentiate(options, saved, cotangents):
    do_BTHV, dfinal_state = cotangents
    dinputs, dinitial_state = _backward(saved, do_BTHV, dfinal_state, options)
    return dinputs, dinitial_state, None


kda_triton.defvjp(_save, _differentiate)


def _forward(inputs, state, codes, options, save):
    plan = Plan(inputs, codes, options)
    chunks = plan.intra(inputs, codes)
    o, s, x, final_state = plan.scan(inputs, codes, chunks, state, save)
    return (o, final_state), (chunks, s, x)


def _backward(saved, do, dfinal_state, options):
    inputs, codes, chunks, s, x = saved
    plan = Plan(inputs, codes, options)
    dr, ds, dinitial_state = plan.reverse(codes, chunks, do, dfinal_state)
    return plan.grads(inputs, codes, x, s, do, dr, ds), dinitial_state


def _codes(runs: Runs | None) -> Array | None:
    """2 * run + real of every token: one array for the kernels."""
    if runs is None:
        return None
    return 2 * runs.run_BT + runs.real_BT.astype(jnp.int32)


class Plan:
    """Sizes, constants and launches of one call."""

    INTRA_WARPS = 4
    GRADS_WARPS = 4
    GRADS_WIDTH = 32

    def __init__(self, inputs: Inputs, codes: Array | None, options: Options):
        self.B, self.T, self.H, self.K = inputs.q.shape
        self.HV, self.V = inputs.v.shape[2:]
        self.C = min(options.chunk_size, 64)
        self.N = self.B * -(-self.T // self.C) * self.HV
        half = all(x.dtype == jnp.bfloat16 for x in (inputs.q, inputs.k, inputs.v))
        self.dtype = jnp.bfloat16 if half else jnp.float32
        self.packed = codes is not None
        self.options = options
        self.BV = min(self.V, 64)

    def _array(self, *shape: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype or self.dtype)

    def _raw(self, inputs: Inputs, codes: Array | None) -> dict[str, Array]:
        """What kernels read that rebuild the chunks; absent arrays get stand-ins."""
        A_log = inputs.A_log
        if A_log is None:
            A_log = jnp.zeros(self.HV)
        dt_bias = inputs.dt_bias
        if dt_bias is None:
            dt_bias = jnp.zeros(self.HV * self.K)
        names = ("q", "k", "g", "beta")
        raw = {name: getattr(inputs, name) for name in names}
        return {**raw, "A_log": A_log, "dt_bias": dt_bias, **self._ids(codes)}

    def _ids(self, codes: Array | None) -> dict[str, Array]:
        return {"ids": jnp.zeros((1, 1), jnp.int32) if codes is None else codes}

    def _activations(self) -> dict[str, Any]:
        options = self.options
        bounded = options.lower_bound is not None
        gate = "bounded" if bounded else "softplus"
        wide = min(WIDE, self.C) if bounded and self.dtype == jnp.bfloat16 else 0
        return {
            "T": self.T,
            "scale": float(options.scale),
            "bound": float(options.lower_bound or 0.0),
            "H": self.H,
            "HV": self.HV,
            "K": self.K,
            "C": self.C,
            "WIDE": wide,
            "GATE": gate if options.use_gate_in_kernel else "none",
            "NORM": options.use_qk_l2norm,
            "SIGMOID": options.use_beta_sigmoid,
            "DOUBLE": options.allow_neg_eigval,
            "PACKED": self.packed,
        }

    def intra(self, inputs: Inputs, codes: Array | None) -> Chunks:
        from pallas_kernels.kda.gpu.intra import intra_kernel
        from pallas_kernels.kda.gpu.launch import launch

        square = self._array(self.N, self.C, self.C)
        wide = self._array(self.N, self.C, self.K)
        outputs = {
            "a_out": square,
            "p_out": square,
            "qp_out": wide,
            "kb_out": wide,
            "kr_out": wide,
            "gam_out": self._array(self.N, self.K, dtype=jnp.float32),
            "b_out": self._array(self.N, self.C, dtype=jnp.float32),
        }
        return Chunks(
            *launch(
                intra_kernel,
                self._raw(inputs, codes),
                outputs,
                self.N,
                num_warps=self.INTRA_WARPS,
                num_stages=1,
                **self._activations(),
            )
        )

    def _serial(self) -> dict[str, Any]:
        return {
            "T": self.T,
            "B": self.B,
            "HV": self.HV,
            "K": self.K,
            "V": self.V,
            "C": self.C,
            "BV": self.BV,
            "PACKED": self.packed,
            "STAGES": 3 if self.dtype == jnp.bfloat16 else 1,
        }

    def scan(self, inputs, codes, chunks, state, save):
        from pallas_kernels.kda.gpu.launch import launch
        from pallas_kernels.kda.gpu.scan import scan_kernel

        names = ("a", "p", "qp", "kb", "kr", "gam", "b")
        tiles = {name: getattr(chunks, name) for name in names}
        outputs = {
            "o": self._array(*inputs.v.shape, dtype=inputs.v.dtype),
            "s_out": self._array(self.N if save else 1, self.V, self.K),
            "x_out": self._array(self.N if save else 1, self.C, self.V),
            "s_last": self._array(*state.shape, dtype=jnp.float32),
        }
        return launch(
            scan_kernel,
            {"v": inputs.v, **tiles, **self._ids(codes), "s0": state},
            outputs,
            self.B * self.HV * (self.V // self.BV),
            num_warps=4,
            num_stages=3,
            NSEG=1,
            SAVE=save,
            SUMMARY=False,
            **self._serial(),
        )

    def reverse(self, codes, chunks, do, dfinal_state):
        from pallas_kernels.kda.gpu.launch import launch
        from pallas_kernels.kda.gpu.scan import reverse_kernel

        names = ("a", "p", "qp", "kb", "kr", "gam")
        tiles = {name: getattr(chunks, name) for name in names}
        outputs = {
            "dr": self._array(self.N, self.C, self.V),
            "ds_out": self._array(self.N, self.V, self.K),
            "ds0": self._array(*dfinal_state.shape, dtype=jnp.float32),
        }
        return launch(
            reverse_kernel,
            {"do": do, **tiles, **self._ids(codes), "ds_last": dfinal_state},
            outputs,
            self.B * self.HV * (self.V // self.BV),
            num_warps=4,
            num_stages=3,
            NSEG=1,
            SUMMARY=False,
            **self._serial(),
        )

    def grads(self, inputs, codes, x, s, do, dr, ds) -> Inputs:
        from pallas_kernels.kda.gpu.grads import grads_kernel
        from pallas_kernels.kda.gpu.launch import launch

        dv, dp, dl, own, db = self._pairs(inputs, codes, do, x, dr)
        heads = (self.B, self.T, self.HV, self.K)
        width = min(self.K, self.GRADS_WIDTH)
        vectors = self._array(self.N, self.K, dtype=jnp.float32)
        sums = self._array(self.K // width, self.N, 3, self.C, dtype=jnp.float32)
        outputs = {
            "dq_out": self._array(*heads, dtype=self._head_dtype(inputs.q)),
            "dk_out": self._array(*heads, dtype=self._head_dtype(inputs.k)),
            "dg_out": self._array(*inputs.g.shape, dtype=inputs.g.dtype),
            "dA_out": vectors,
            "dbias_out": vectors,
            "sums_out": sums,
        }
        arrays = self._raw(inputs, codes)
        arrays |= {"do": do, "x_in": x, "s": s, "ds": ds, "dr": dr}
        arrays |= {"dp": dp, "dl": dl, "own_in": own}
        dq, dk, dg, dA, dbias, sums = launch(
            grads_kernel,
            arrays,
            outputs,
            self.N * (self.K // width),
            num_warps=self.GRADS_WARPS,
            num_stages=1,
            V=self.V,
            W=width,
            N=self.N,
            **self._activations(),
        )
        dq, dk, dbeta = self._finish(inputs, codes, sums, db, dq, dk, width)
        dq, dk = (
            self._sum_groups(dx, x) for dx, x in ((dq, inputs.q), (dk, inputs.k))
        )
        by_head = -1, self.HV, self.K
        dA_log = ddt_bias = None
        if inputs.A_log is not None:
            dA_log = jnp.sum(dA.reshape(by_head), (0, 2)).astype(inputs.A_log.dtype)
        if inputs.dt_bias is not None:
            ddt_bias = jnp.sum(dbias.reshape(by_head), 0).reshape(-1)
            ddt_bias = ddt_bias.astype(inputs.dt_bias.dtype)
        return Inputs(dq, dk, dv, dg, dbeta, dA_log, ddt_bias)

    def _pairs(self, inputs, codes, do, x, dr):
        from pallas_kernels.kda.gpu.grads import pairs_kernel
        from pallas_kernels.kda.gpu.launch import launch

        square = self._array(self.N, self.C, self.C)
        row = self._array(self.N, self.C, dtype=jnp.float32)
        outputs = {
            "dv_out": self._array(*inputs.v.shape, dtype=inputs.v.dtype),
            "dp": square,
            "dl": square,
            "own_out": row,
            "db_out": row,
        }
        arrays = {"v": inputs.v, "beta": inputs.beta, **self._ids(codes)}
        return launch(
            pairs_kernel,
            {**arrays, "do": do, "x_in": x, "dr": dr},
            outputs,
            self.N,
            num_warps=4,
            num_stages=1,
            T=self.T,
            HV=self.HV,
            V=self.V,
            C=self.C,
            SIGMOID=self.options.use_beta_sigmoid,
            DOUBLE=self.options.allow_neg_eigval,
            PACKED=self.packed,
        )

    def _finish(self, inputs, codes, sums, db, dq, dk, width):
        from pallas_kernels.kda.gpu.grads import finish_kernel
        from pallas_kernels.kda.gpu.launch import launch

        names = ("H", "HV", "K", "C", "T", "NORM", "SIGMOID", "DOUBLE", "PACKED")
        settings = {name: self._activations()[name] for name in names}
        outputs = {
            "dq_out": jax.ShapeDtypeStruct(dq.shape, dq.dtype),
            "dk_out": jax.ShapeDtypeStruct(dk.shape, dk.dtype),
            "dbeta_out": self._array(*inputs.beta.shape, dtype=inputs.beta.dtype),
        }
        arrays = {"q": inputs.q, "k": inputs.k, "beta": inputs.beta}
        arrays |= {**self._ids(codes), "sums": sums, "db_in": db, "dy_q": dq, "dy_k": dk}
        dx_q, dx_k, dbeta = launch(
            finish_kernel,
            arrays,
            outputs,
            self.N,
            num_warps=4,
            num_stages=1,
            W=width,
            N=self.N,
            **settings,
        )
        norm = self.options.use_qk_l2norm
        return (dx_q if norm else dq), (dx_k if norm else dk), dbeta

    def _head_dtype(self, x: Array) -> Any:
        """Of gradients by value head, before those that share a key head are added."""
        return x.dtype if self.HV == self.H else jnp.float32

    def _sum_groups(self, dx_BTHK: Array, x: Array) -> Array:
        """Adds up the value heads that share a key head."""
        if self.HV == self.H:
            return dx_BTHK
        grouped = dx_BTHK.reshape(*x.shape[:3], -1, self.K)
        return jnp.sum(grouped, axis=3).astype(x.dtype)
