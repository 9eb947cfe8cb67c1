"""Collectives read off small programs, written by hand and compiled."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from kimi_jax.hlo import KINDS, Collective, collective_bytes, memory_bytes

HEADER = "HloModule m, is_scheduled=true, num_partitions=8\n\n"
SUM = "%sum (a: f32[], b: f32[]) -> f32[] {\n  ROOT %s = f32[] add(%a, %b)\n}\n\n"


def entry(*lines):
    body = "".join(f"  {line}\n" for line in lines)
    return f"ENTRY %main (x: f32[16,4]) -> f32[] {{\n{body}}}\n"


def module(*lines, before=""):
    return HEADER + SUM + before + entry("%x = f32[16,4]{1,0} parameter(0)", *lines)


@pytest.mark.parametrize(
    ("line", "kind", "size", "sent"),
    [
        (
            "%y = f32[128,4]{1,0} all-gather(%x), replica_groups=[1,8]<=[8]",
            "all-gather", 2048, 1792,
        ),
        (
            "%y = f32[32,4]{1,0} all-gather(f32[16,4]{1,0} %x), "
            "replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}",
            "all-gather", 512, 256,
        ),
        (
            "%y = f32[16,4]{1,0} all-reduce(%x), replica_groups={}, to_apply=%sum",
            "all-reduce", 256, 448,
        ),
        (
            "%y = f32[4,4]{1,0} reduce-scatter(%x), to_apply=%sum, "
            "replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}",
            "reduce-scatter", 256, 192,
        ),
        (
            "%y = (f32[8,4]{1,0}, f32[8,4]{1,0}) all-to-all(%x1, %x2), "
            "replica_groups=mesh['a'=4,'b'=2] {'b'}",
            "all-to-all", 256, 128,
        ),
        (
            "%y = f32[16,4]{1,0} collective-permute(%x), "
            "source_target_pairs={{0,1},{1,0}}",
            "collective-permute", 256, 256,
        ),
        (
            "%y = f32[16,4]{1,0} ragged-all-to-all(%x, %x), "
            "replica_groups={{0,1},{2,3},{4,5},{6,7}}",
            "ragged-all-to-all", 512, 256,
        ),
        (
            "%y = bf16[3,5]{1,0:T(8,128)(2,1)S(1)} all-reduce(%x4), "
            "replica_groups={{0,1}}, to_apply=%sum",
            "all-reduce", 30, 30,
        ),
    ],
)  # fmt: skip
def test_kinds_groups_and_types(line, kind, size, sent):
    makers = ("%x1 = f32[8,4] slice(%x)", "%x2 = f32[8,4] slice(%x)", "%x4 = s4[] c()")
    found = collective_bytes(module(*makers, line))
    assert found == {kind: Collective(1, size, sent, True)}


def test_start_and_done_are_one():
    text = module(
        "%g = (f32[16,4]{1,0}, f32[128,4]{1,0}) all-gather-start(%x), "
        "replica_groups=[1,8]<=[8], dimensions={0}",
        "%gd = f32[128,4]{1,0} all-gather-done(%g)",
        "%r = f32[16,4]{1,0} all-reduce-start(%x), replica_groups={}, to_apply=%sum",
        "%rd = f32[16,4]{1,0} all-reduce-done(%r)",
        "%p = (f32[16,4]{1,0}, f32[16,4]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) "
        "collective-permute-start(%x), source_target_pairs={{0,1}}",
        "%pd = f32[16,4]{1,0} collective-permute-done(%p)",
        "%a = ((f32[16,4]), f32[2,4], s32[]) async-start(%x), calls=%wrapped",
        "%ad = f32[2,4] async-done(%a), calls=%wrapped",
        before=(
            "%wrapped (p: f32[16,4]) -> f32[2,4] {\n"
            "  %p = f32[16,4]{1,0} parameter(0)\n"
            "  ROOT %q = f32[2,4] reduce-scatter(%p), replica_groups={}, "
            "to_apply=%sum\n}\n\n"
        ),
    )
    assert collective_bytes(text) == {
        "all-gather": Collective(1, 2048, 1792, True),
        "all-reduce": Collective(1, 256, 448, True),
        "collective-permute": Collective(1, 256, 256, True),
        "reduce-scatter": Collective(1, 256, 224, True),
    }


def test_parts_of_a_chain_count_once():
    """TPU spreads one collective over several fusions."""
    line = '%g = f32[16] all-gather(%p), frontend_attributes={{chain_id="{}"}}'
    parts = "".join(
        f"%part{i} (p: f32[2]) -> f32[16] {{\n  %p = f32[2] parameter(0)\n"
        f"  {line.format(chain)}\n}}\n\n"
        for i, chain in enumerate((0, 0, 1))
    )
    calls = [f"%f{i} = f32[16] fusion(%x), calls=%part{i}" for i in range(3)]
    found = collective_bytes(module(*calls, before=parts))
    assert found == {"all-gather": Collective(2, 128, 112, True)}


def test_an_all_reduce_that_is_sliced_at_once_is_a_reduce_scatter():
    """As the TPU compiler writes it; the all-reduce beside it stays one."""
    scatter = (
        "%all-reduce-scatter.1 (input: f32[16,4]) -> f32[2,4] {\n"
        "  %input = f32[16,4]{1,0} parameter(0)\n"
        "  %all-reduce.7 = f32[16,4]{1,0} all-reduce(%input), replica_groups={}, "
        "to_apply=%sum\n"
        "  ROOT %d = f32[2,4]{1,0} dynamic-slice(%all-reduce.7, %i, %j), "
        "dynamic_slice_sizes={2,4}\n}\n\n"
    )
    text = module(
        "%f = f32[2,4]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1",
        "%r = f32[16,4]{1,0} all-reduce(%x), replica_groups={}, to_apply=%sum",
        before=scatter,
    )
    assert collective_bytes(text) == {
        "reduce-scatter": Collective(1, 256, 224, True),
        "all-reduce": Collective(1, 256, 448, True),
    }


def loop(attributes="", stop="%n"):
    return (
        "%body (s: (s32[], f32[16,4])) -> (s32[], f32[16,4]) {\n"
        "  %s = (s32[], f32[16,4]) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%s), index=0\n"
        "  %one = s32[] constant(1)\n"
        "  %next = s32[] add(%i, %one)\n"
        "  %v = f32[16,4]{1,0} get-tuple-element(%s), index=1\n"
        "  %w = f32[16,4]{1,0} collective-permute(%v), source_target_pairs={{0,1}}\n"
        "  ROOT %t = (s32[], f32[16,4]) tuple(%next, %w)\n}\n\n"
        "%test (s: (s32[], f32[16,4])) -> pred[] {\n"
        "  %s = (s32[], f32[16,4]) parameter(0)\n"
        "  %n = s32[] constant(9)\n"
        "  %m = s32[] get-tuple-element(%s), index=1\n"
        "  %i = s32[] get-tuple-element(%s), index=0\n"
        f"  ROOT %c = pred[] compare(%i, {stop}), direction=LT\n}}\n\n"
    ), (
        "%k = s32[] constant(2)",
        "%kc = s32[] copy(%k)",
        "%t = (s32[], f32[16,4]) tuple(%kc, /*index=1*/%x)",
        f"%l = (s32[], f32[16,4]) while(%t), condition=%test, body=%body{attributes}",
    )


@pytest.mark.parametrize(
    ("attributes", "stop", "runs", "exact"),
    [
        (', backend_config={"known_trip_count":{"n":"5"},"x":{}}', "%m", 5, True),
        ("", "%n", 7, True),
        ("", "%m", 1, False),
    ],
)
def test_loops_count_as_often_as_they_run(attributes, stop, runs, exact):
    before, lines = loop(attributes, stop)
    found = collective_bytes(module(*lines, before=before))
    expected = Collective(runs, 256 * runs, 256 * runs, exact)
    assert found == {"collective-permute": expected}


def test_the_costliest_branch_counts():
    branches = "".join(
        f"%b{n} (p: f32[{n}]) -> f32[{n}] {{\n  %p = f32[{n}] parameter(0)\n"
        f"  ROOT %r = f32[{n}] all-reduce(%p), replica_groups={{}}, "
        "to_apply=%sum\n}\n\n"
        for n in (8, 16)
    )
    line = "%c = f32[] conditional(%x, %x, %x), branch_computations={%b8, %b16}"
    found = collective_bytes(module(line, before=branches))
    assert found == {"all-reduce": Collective(1, 64, 112, False)}


def test_compiled_program():
    """What XLA prints today: a scan of three rounds of four kinds over 4 of 8."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("b"), out_specs=P("b"))
    def run(x):
        def step(x, _):
            x = lax.ppermute(jnp.sin(x), "b", [(i, (i + 1) % 4) for i in range(4)])
            gathered = jnp.sin(lax.all_gather(x, "b"))
            x = jnp.sin(lax.psum_scatter(gathered, "b"))
            return lax.all_to_all(x, "b", 0, 0, tiled=True), None

        return lax.scan(step, x, length=3)[0]

    text = run.lower(np.zeros(32, np.float32)).compile().as_text()
    piece = 8 * 4
    assert collective_bytes(text) == {
        "collective-permute": Collective(3, 3 * piece, 3 * piece, True),
        "all-gather": Collective(3, 3 * 4 * piece, 3 * 3 * piece, True),
        "reduce-scatter": Collective(3, 3 * 4 * piece, 3 * 3 * piece, True),
        "all-to-all": Collective(3, 3 * piece, 3 * piece * 3 // 4, True),
    }
    assert set(collective_bytes(text)) < set(KINDS)


def test_other_texts_are_refused():
    text = jax.jit(jnp.sin).lower(1.0).as_text()
    with pytest.raises(ValueError, match=r"compiled\.as_text\(\)"):
        collective_bytes(text)
    assert collective_bytes(jax.jit(jnp.sin).lower(1.0).compile().as_text()) == {}


def test_memory_is_counted_once_and_kernels_apart():
    text = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: bf16[8,128]) -> f32[8,128] {
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %copy-start = (bf16[8,128]{1,0}, bf16[8,128]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %copy-done = bf16[8,128]{1,0} copy-done(%copy-start)
  %same = bf16[1024]{0} bitcast(%copy-done)
  %wide = f32[8,128]{1,0} convert(%x)
  ROOT %y = f32[8,128]{1,0} custom-call(%wide, %x), custom_call_target="tpu_custom_call"
}
"""
    half, wide = 2 * 8 * 128, 4 * 8 * 128
    assert memory_bytes(text) == (2 * wide + half, wide + half)
