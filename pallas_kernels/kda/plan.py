"""Sizes, constants and launches of the Triton kernels, as `triton.py` strings them."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda import ranks
from pallas_kernels.kda.gates import Inputs, Options

Array = jax.Array

# Tokens whose decay one float32 exponent can hold, see `gpu.tiles`.
WIDE = 32
# Multiprocessors of the cards this is tuned for, and the fewest chunks in a segment or
# a piece of time.
PROCESSORS = 132
LEAST_CHUNKS = 16
# Relative to a scan in which every program has its processor: what a scan without
# outputs takes, and what starting one more piece of time costs.
AHEAD = 0.7
PIECE_COST = 0.02


class Chunks(NamedTuple):
    """Tiles a = A - I and p [N,C,C]; kq [N,2,C,K] of Kb and Qp; kr [N,C,K].

    gam [N,K] decays through the chunk, b [N,C] is the write strength. norms [N,2,C]
    normalise q and k; sums [N,2,K] are log2 decays, where the gate is bounded. N counts
    batch rows, chunks and value heads, the last fastest.
    """

    a: Array
    p: Array
    kq: Array
    kr: Array
    gam: Array
    b: Array
    norms: Array
    sums: Array | None = None


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
        # Of a scan that is cut nowhere, and of the pass that finds summaries.
        self.programs = self.B * self.HV * (self.V // self.BV)
        self.summary_programs = self.B * self.HV * ((self.V + self.K) // self.BV)
        self.segments, self.summarise = self._count_segments()
        self.pieces = self._count_pieces()

    def _count_segments(self) -> tuple[int, bool]:
        """How many segments end soonest, with the pass that finds states at borders.

        That pass runs ahead through all but the last, or carries V + K columns through
        all at once, which ranks of a mesh axis need anyway (True).
        """
        ranks = self.options.axis is not None
        most = min(PROCESSORS // self.programs, -(-self.T // self.C) // LEAST_CHUNKS)

        def length(choice: tuple[int, bool]) -> float:
            segments, summarise = choice
            rounds = float(-(-self.programs * segments // PROCESSORS))
            if summarise:
                rounds += -(-self.summary_programs * segments // PROCESSORS)
            else:
                rounds += AHEAD * (segments - 1)
            return rounds / segments

        choices = [(n, ranks) for n in range(1, max(1, most) + 1)]
        if not ranks:
            choices += [(n, True) for n in range(2, most + 1)]
        return min(choices, key=length)

    def _count_pieces(self) -> int:
        """Cuts time where programs fill their last round of processors badly."""
        if self.programs <= PROCESSORS:
            return 1
        most = min(4, -(-self.T // self.C) // LEAST_CHUNKS)

        def length(pieces: int) -> float:
            rounds = -(-self.programs * pieces // PROCESSORS)
            return rounds / pieces + PIECE_COST * pieces

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
        from pallas_kernels.kda.gpu.bounded_intra import bounded_intra_kernel
        from pallas_kernels.kda.gpu.intra import intra_kernel
        from pallas_kernels.kda.gpu.launch import launch

        constants = self.activations()
        square = self._array(self.N, self.C, self.C)
        outputs = {
            "a_out": square,
            "p_out": square,
            "kq_out": self._array(self.N, 2, self.C, self.K),
            "kr_out": self._array(self.N, self.C, self.K),
            "gam_out": self._array(self.N, self.K, dtype=jnp.float32),
            "b_out": self._array(self.N, self.C, dtype=jnp.float32),
            "norms_out": self._array(self.N, 2, self.C, dtype=jnp.float32),
        }
        kernel = intra_kernel
        if constants["WIDE"]:
            kernel = bounded_intra_kernel
            outputs["sums_out"] = self._array(self.N, 2, self.K, dtype=jnp.float32)
        else:
            del constants["WIDE"]
        made = launch(
            kernel,
            self.raw(inputs, codes),
            outputs,
            self.N,
            num_warps=self.INTRA_WARPS,
            num_stages=1,
            **constants,
        )
        return Chunks(*made)

    def _serial(self, kernel, inputs, outputs, first: int, programs: int, **settings):
        """Launches programs from `first` on, PROCESSORS at a time if time is cut.

        Later launches go on in the arrays of those before.
        """
        from pallas_kernels.kda.gpu.launch import launch

        pieces = 1 if settings["SUMMARY"] else self.pieces
        launches = -(-programs // PROCESSORS) if pieces > 1 else 1
        each = -(-programs // launches)
        made: tuple[Array, ...] = ()
        for start in range(first, first + programs, each):
            made = launch(
                kernel,
                {**inputs, **dict(zip(outputs, made, strict=False))},
                outputs,
                min(each, first + programs - start),
                num_warps=4,
                num_stages=3,
                T=self.T,
                B=self.B,
                NSEG=self.segments,
                PIECES=pieces,
                first_pair=start,
                HV=self.HV,
                K=self.K,
                V=self.V,
                C=self.C,
                BV=self.BV,
                PACKED=self.packed,
                STAGES=3 if self.dtype == jnp.bfloat16 else 1,
                **settings,
            )
        return made

    def _rows(self, run, states, **settings):
        """All programs of a scan: `run(states, first, programs, ...)`."""
        programs = self.programs * self.segments * self.pieces
        return run(states, 0, programs, SUMMARY=False, OUTPUTS=True, **settings)

    def _summaries(self, run, states):
        """[S,B,HV,K,V+K]: what each segment does to any state, see `scan.py`."""
        programs = self.summary_programs * self.segments
        *_, summaries = run(states, 0, programs, SUMMARY=True, OUTPUTS=False)
        return jnp.moveaxis(summaries, 1, 0)

    def _run_ahead(self, run, state_BHKV: Array, step: int) -> Array:
        """[B,S,HV,K,V]: the state that enters each segment, found one by one.

        step: 1 from the first segment on, -1 from the last.
        """
        shape = (self.B, self.segments, *state_BHKV.shape[1:])
        states = jnp.broadcast_to(state_BHKV[:, None], shape)
        for segment in range(self.segments)[::step][:-1]:
            first = segment * self.programs
            *_, last = run(states, first, self.programs, SUMMARY=False, OUTPUTS=False)
            states = states.at[:, segment + step].set(last[:, segment])
        return states

    def scan(self, inputs, passes, chunks, state, save):
        """Returns o, states before the chunks and X (if `save`), and the last state."""
        run = partial(self._scan, inputs, chunks)
        states, axis = state[:, None], self.options.axis
        if self.summarise:
            summaries = self._summaries(run, states)
            if axis is not None:
                piece = ranks.whole(summaries, jnp.zeros_like(state))
                state = ranks.exchange(piece, state, passes, axis)
            states = self._enter(summaries, state)
        elif self.segments > 1:
            states = self._run_ahead(run, state, 1)
        o, s, x, last = self._rows(run, states, SAVE=save)
        return o, s, x, last[:, -1]

    def _scan(self, inputs, chunks, states, first, programs, SAVE=False, **modes):
        from pallas_kernels.kda.gpu.scan import scan_kernel

        names = ("a", "p", "kq", "kr", "gam", "b")
        tiles = {name: getattr(chunks, name) for name in names}
        outputs = {
            "o": self._array(
                *(inputs.v.shape if modes["OUTPUTS"] else (1,)), dtype=inputs.v.dtype
            ),
            "s_out": self._array(self.N if SAVE else 1, self.V, self.K),
            "x_out": self._array(self.N if SAVE else 1, self.C, self.V),
            "s_last": self._states(modes["SUMMARY"]),
        }
        arrays = {"v": inputs.v, **tiles, "s0": states}
        modes["SAVE"] = SAVE
        return self._serial(scan_kernel, arrays, outputs, first, programs, **modes)

    def reverse(self, codes, passes, chunks, do, dstate):
        """Returns dR, and gradients by the states after the chunks and by the first."""
        run = partial(self._reverse, codes, chunks, do)
        dstates, axis = dstate[:, None], self.options.axis
        if self.summarise:
            summaries = self._summaries(run, dstates)[::-1]
            if axis is not None:
                piece, none = ranks.whole(summaries, dstate), jnp.zeros_like(dstate)
                dstate += ranks.exchange(piece, none, passes, axis, reverse=True)
            dstates = self._enter(summaries, dstate)[:, ::-1]
        elif self.segments > 1:
            dstates = self._run_ahead(run, dstate, -1)
        dr, ds, first = self._rows(run, dstates)
        dfirst = first[:, 0]
        if axis is not None:  # the initial state is that of rank 0
            dfirst = jnp.where(jax.lax.axis_index(axis) == 0, dfirst, 0.0)
        return dr, ds, dfirst

    def _reverse(self, codes, chunks, do, dstates, first, programs, **modes):
        from pallas_kernels.kda.gpu.scan import reverse_kernel

        names = ("a", "p", "kq", "kr", "gam")
        tiles = {name: getattr(chunks, name) for name in names}
        count = self.N if modes["OUTPUTS"] else 1
        outputs = {
            "dr": self._array(count, self.C, self.V),
            "ds_out": self._array(count, self.V, self.K),
            "ds0": self._states(modes["SUMMARY"]),
        }
        arrays = {"do": do, **tiles, **self._ids(codes), "ds_last": dstates}
        return self._serial(reverse_kernel, arrays, outputs, first, programs, **modes)

    def _states(self, summary: bool) -> jax.ShapeDtypeStruct:
        width = self.V + self.K if summary else self.V
        shape = (self.B, self.segments, self.HV, self.K, width)
        return self._array(*shape, dtype=jnp.float32)

    def _enter(self, summaries_SBHKW: Array, state_BHKV: Array) -> Array:
        """[B,S,HV,K,V]: the state that enters each segment, from S -> Phi S + Psi."""

        def step(state, summary):
            return ranks.through(summary, state), state

        return jnp.moveaxis(jax.lax.scan(step, state_BHKV, summaries_SBHKW)[1], 0, 1)

    def grads(self, inputs, codes, chunks, s, x, do, dr, ds, pairs) -> Inputs:
        """Gradients by the raw inputs; `pairs` is what `pairs` returns."""
        from pallas_kernels.kda.gpu.grads import grads_kernel
        from pallas_kernels.kda.gpu.launch import launch

        dv, dp, dl, rows, db, sizes = pairs
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
        sums = jnp.zeros(1) if chunks.sums is None else chunks.sums
        arrays |= {"sums": sums, "gam": chunks.gam, "ones": ones}
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

    def pairs(self, inputs, codes, b, do, o, x, dr):
        """Returns dv, dP, dL, sums of rows, db and sizes, see `gpu/pairs.py`."""
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
