"""Sizes, constants and launches of the Triton kernels, as `triton.py` strings them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import ranks
from pallas_kernels.kda.gates import Inputs, Options

Array = jax.Array

# Tokens whose decay one float32 exponent can hold, see `gpu.tiles`.
WIDE = 32
# Multiprocessors of the cards this is tuned for, and the fewest chunks in a segment.
PROCESSORS = 132
LEAST_CHUNKS = 16


class Chunks(NamedTuple):
    """Tiles a, p [N,C,C]; qp, kb, kr [N,C,K]; vectors gam [N,K], b [N,C].

    norms [N,2,C] normalise q and k; sums [N,2,K] are log2 decays. N counts batch rows,
    chunks and value heads, the last fastest.
    """

    a: Array
    p: Array
    qp: Array
    kb: Array
    kr: Array
    gam: Array
    b: Array
    norms: Array
    sums: Array


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
        # Columns of the state a program carries; they divide a summary's K columns too.
        self.BV = min(self.V, self.K, 64)
        self.segments = self._count_segments()

    def _count_segments(self) -> int:
        """Cuts rows where the scan, and the pass that finds summaries, end sooner.

        That pass carries V + K columns. Ranks of a mesh axis need it anyway.
        """
        programs = self.B * self.HV * (self.V // self.BV)
        summaries = self.B * self.HV * ((self.V + self.K) // self.BV)
        most = min(PROCESSORS // programs, -(-self.T // self.C) // LEAST_CHUNKS)

        def length(segments: int) -> float:
            """Of all passes, relative to a scan in which every program has its SM."""
            waves = -(-programs * segments // PROCESSORS)
            if segments > 1 or self.options.axis is not None:
                waves += -(-summaries * segments // PROCESSORS)
            return waves / segments

        return min(range(1, max(1, most) + 1), key=length)

    def _array(self, *shape: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype or self.dtype)

    def raw(self, inputs: Inputs, codes: Array | None) -> dict[str, Array]:
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

    def activations(self) -> dict[str, Any]:
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

    def _some(self, names: tuple[str, ...]) -> dict[str, Any]:
        activations = self.activations()
        return {name: activations[name] for name in names}

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
            "norms_out": self._array(self.N, 2, self.C, dtype=jnp.float32),
            "sums_out": self._array(self.N, 2, self.K, dtype=jnp.float32),
        }
        return Chunks(
            *launch(
                intra_kernel,
                self.raw(inputs, codes),
                outputs,
                self.N,
                num_warps=self.INTRA_WARPS,
                num_stages=1,
                **self.activations(),
            )
        )

    def _serial(self, summary: bool) -> dict[str, Any]:
        columns = self.V + self.K if summary else self.V
        return {
            "programs": self.B * self.HV * self.segments * (columns // self.BV),
            "num_warps": 4,
            "num_stages": 3,
            "T": self.T,
            "B": self.B,
            "NSEG": self.segments,
            "HV": self.HV,
            "K": self.K,
            "V": self.V,
            "C": self.C,
            "BV": self.BV,
            "PACKED": self.packed,
            "SUMMARY": summary,
            "STAGES": 3 if self.dtype == jnp.bfloat16 else 1,
        }

    def scan(self, inputs, codes, passes, chunks, state, save):
        """Returns o, states before the chunks and X (if `save`), and the last state."""
        states, axis = state[:, None], self.options.axis
        if self.segments > 1 or axis is not None:
            *_, summaries = self._scan(inputs, codes, chunks, states, False, True)
            summaries = jnp.moveaxis(summaries, 1, 0)
            if axis is not None:
                piece = ranks.whole(summaries, jnp.zeros_like(state))
                state = ranks.exchange(piece, state, passes, axis)
            states = self._enter(summaries, state)
        o, s, x, last = self._scan(inputs, codes, chunks, states, save, False)
        return o, s, x, last[:, -1]

    def _scan(self, inputs, codes, chunks, states, save, summary):
        from pallas_kernels.kda.gpu.launch import launch
        from pallas_kernels.kda.gpu.scan import scan_kernel

        names = ("a", "p", "qp", "kb", "kr", "gam", "b")
        tiles = {name: getattr(chunks, name) for name in names}
        o_shape = (1,) if summary else inputs.v.shape
        outputs = {
            "o": self._array(*o_shape, dtype=inputs.v.dtype),
            "s_out": self._array(self.N if save else 1, self.V, self.K),
            "x_out": self._array(self.N if save else 1, self.C, self.V),
            "s_last": self._states(summary),
        }
        return launch(
            scan_kernel,
            {"v": inputs.v, **tiles, **self._ids(codes), "s0": states},
            outputs,
            SAVE=save,
            **self._serial(summary),
        )

    def reverse(self, codes, passes, chunks, do, dstate):
        """Returns dR, and gradients by the states after the chunks and by the first."""
        dstates, axis = dstate[:, None], self.options.axis
        if self.segments > 1 or axis is not None:
            *_, summaries = self._reverse(codes, chunks, do, dstates, True)
            summaries = jnp.moveaxis(summaries, 1, 0)[::-1]
            if axis is not None:
                piece, none = ranks.whole(summaries, dstate), jnp.zeros_like(dstate)
                dstate += ranks.exchange(piece, none, passes, axis, reverse=True)
            dstates = self._enter(summaries, dstate)[:, ::-1]
        dr, ds, first = self._reverse(codes, chunks, do, dstates, False)
        dfirst = first[:, 0]
        if axis is not None:  # the initial state is that of rank 0
            dfirst = jnp.where(jax.lax.axis_index(axis) == 0, dfirst, 0.0)
        return dr, ds, dfirst

    def _reverse(self, codes, chunks, do, dstates, summary):
        from pallas_kernels.kda.gpu.launch import launch
        from pallas_kernels.kda.gpu.scan import reverse_kernel

        names = ("a", "p", "qp", "kb", "kr", "gam")
        tiles = {name: getattr(chunks, name) for name in names}
        count = 1 if summary else self.N
        outputs = {
            "dr": self._array(count, self.C, self.V),
            "ds_out": self._array(count, self.V, self.K),
            "ds0": self._states(summary),
        }
        return launch(
            reverse_kernel,
            {"do": do, **tiles, **self._ids(codes), "ds_last": dstates},
            outputs,
            **self._serial(summary),
        )

    def _states(self, summary: bool) -> jax.ShapeDtypeStruct:
        width = self.V + self.K if summary else self.V
        shape = (self.B, self.segments, self.HV, self.K, width)
        return self._array(*shape, dtype=jnp.float32)

    def _enter(self, summaries_SBHKW: Array, state_BHKV: Array) -> Array:
        """[B,S,HV,K,V]: the state that enters each segment, from S -> Phi S + Psi."""

        def step(state, summary):
            return ranks.through(summary, state), state

        return jnp.moveaxis(jax.lax.scan(step, state_BHKV, summaries_SBHKW)[1], 0, 1)

    def grads(self, inputs, codes, chunks, s, x, o, do, dr, ds) -> Inputs:
        from pallas_kernels.kda.gpu.grads import grads_kernel
        from pallas_kernels.kda.gpu.launch import launch

        dv, dp, dl, rows, db, sizes = self._pairs(inputs, codes, chunks.b, do, o, x, dr)
        heads = (self.B, self.T, self.HV, self.K)
        width = min(self.K, self.GRADS_WIDTH)
        parts = self.K // width
        vectors = self._array(self.N, self.K, dtype=jnp.float32)
        outputs = {
            "dq_out": self._array(*heads, dtype=self._head_dtype(inputs.q)),
            "dk_out": self._array(*heads, dtype=self._head_dtype(inputs.k)),
            "dg_out": self._array(*inputs.g.shape, dtype=inputs.g.dtype),
            "dA_out": vectors,
            "dbias_out": vectors,
            "rise_out": self._array(parts, self.N, self.C, dtype=jnp.float32),
        }
        arrays = self.raw(inputs, codes)
        del arrays["beta"]
        arrays |= {"do": do, "x": x, "s": s, "ds": ds, "dr": dr, "dp": dp, "dl": dl}
        arrays |= {"b": chunks.b, "rows": rows, "sizes": sizes, "norms": chunks.norms}
        ones = jnp.tril(jnp.ones((self.C, self.C), self.dtype))
        arrays |= {"sums": chunks.sums, "gam": chunks.gam, "ones": ones}
        names: tuple[str, ...] = ("T", "scale", "bound", "H", "HV", "K", "C", "WIDE")
        names += ("GATE", "NORM", "SIGMOID", "PACKED")
        dq, dk, dg, dA, dbias, rise = launch(
            grads_kernel,
            arrays,
            outputs,
            self.N * parts,
            num_warps=self.GRADS_WARPS,
            num_stages=1,
            V=self.V,
            W=width,
            N=self.N,
            **self._some(names),
        )
        dq, dk = (self._sum_groups(dx, x) for dx, x in ((dq, inputs.q), (dk, inputs.k)))
        dbeta = self._by_token(db, rise).astype(inputs.beta.dtype)
        by_head = -1, self.HV, self.K
        dA_log = ddt_bias = None
        if inputs.A_log is not None:
            dA_log = jnp.sum(dA.reshape(by_head), (0, 2)).astype(inputs.A_log.dtype)
        if inputs.dt_bias is not None:
            ddt_bias = jnp.sum(dbias.reshape(by_head), 0).reshape(-1)
            ddt_bias = ddt_bias.astype(inputs.dt_bias.dtype)
        return Inputs(dq, dk, dv, dg, dbeta, dA_log, ddt_bias)

    def _pairs(self, inputs, codes, b, do, o, x, dr):
        from pallas_kernels.kda.gpu.launch import launch
        from pallas_kernels.kda.gpu.pairs import pairs_kernel

        square = self._array(self.N, self.C, self.C)
        outputs = {
            "dv_out": self._array(*inputs.v.shape, dtype=inputs.v.dtype),
            "dp_out": square,
            "dl_out": square,
            "rows_out": self._array(self.N, 3, self.C, dtype=jnp.float32),
            "db_out": self._array(self.N, self.C, dtype=jnp.float32),
            "size_out": self._array(self.N, dtype=jnp.float32),
        }
        arrays = {"v": inputs.v, "beta": inputs.beta, "b": b, **self._ids(codes)}
        return launch(
            pairs_kernel,
            {**arrays, "do": do, "o": o, "x": x, "dr": dr},
            outputs,
            self.N,
            num_warps=4,
            num_stages=1,
            V=self.V,
            **self._some(("T", "HV", "C", "SIGMOID", "PACKED")),
        )

    def _by_token(self, db_NC: Array, rise_PNC: Array) -> Array:
        """[B,T,HV]: the gradient by beta; a sigmoid's needs nothing from `rise`."""
        if not self.options.use_beta_sigmoid:
            db_NC = db_NC + jnp.sum(rise_PNC, 0)
            db_NC *= 2.0 if self.options.allow_neg_eigval else 1.0
        db = db_NC.reshape(self.B, -1, self.HV, self.C)
        return jnp.swapaxes(db, 2, 3).reshape(self.B, -1, self.HV)[:, : self.T]

    def _head_dtype(self, x: Array) -> Any:
        """Of gradients by value head, before those that share a key head are added."""
        return x.dtype if self.HV == self.H else jnp.float32

    def _sum_groups(self, dx_BTHK: Array, x: Array) -> Array:
        """Adds up the value heads that share a key head."""
        if self.HV == self.H:
            return dx_BTHK
        grouped = dx_BTHK.reshape(*x.shape[:3], -1, self.K)
        return jnp.sum(grouped, axis=3).astype(x.dtype)
