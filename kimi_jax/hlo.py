"""Reads collectives, and how many bytes they move, off the text of a compiled program.

Text in, numbers out; nothing here needs JAX or a device. The text is XLA's own HLO, as
`compiled.as_text()` or `lowered.as_text("hlo")` print it, after partitioning: shapes
are those of one device.
"""

import re
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)

# Bits of an element. Types that are no numbers (token, opaque) take no bytes.
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=\s]*)\]")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{$")


# Opcodes that move nothing, or are the second half of one that does.
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
    *("copy-start", "copy-done", "after-all", "partition-id"),
)


class Collective(NamedTuple):
    """Totals of one kind of collective, on one device, over one run of the program.

    runs: how often one is executed.
    bytes: operands or results, whichever is larger: the whole buffer of a gather,
      scatter or exchange, this device's share included.
    sent_bytes: what the device sends if the algorithm wastes nothing, in a group of n:
      (n-1)/n of the buffer; twice that for all-reduce; all of it for a permute.
    exact: False if some of them run in a loop whose length the text does not tell, or
      in a branch. Such loops count once, and the costliest branch counts.
    """

    runs: int
    bytes: int
    sent_bytes: int
    exact: bool


Totals = dict[str, Collective]
_NONE = Collective(0, 0, 0, True)


class _Instruction(NamedTuple):
    type: str
    opcode: str
    operands: str
    attributes: str


def collective_bytes(hlo_text: str) -> dict[str, Collective]:
    """Counts the collectives of a program and adds up their bytes.

    Loops count as often as they run, if XLA wrote the number down or if they count from
    one constant to another. A collective that is split into start and done, or over
    several fusions (a chain, on TPU), counts once.

    Args:
      hlo_text: HLO of one module.

    Returns:
      Kind -> totals, for the kinds that occur. `KINDS` lists all of them.

    Raises:
      ValueError: the text is no HLO module.
    """
    if not hlo_text.lstrip().startswith("HloModule"):
        raise ValueError(
            f"the text begins with {hlo_text.lstrip()[:40]!r}, expected 'HloModule'; "
            "pass compiled.as_text() or lowered.as_text('hlo')"
        )
    entry, computations = _parse(hlo_text)
    return _Counter(computations, _devices(hlo_text)).totals(entry)


def memory_bytes(hlo_text: str) -> tuple[int, int]:
    """Bytes that custom calls, and that all else, read and write in memory.

    Operands and results of the entry's instructions; what they call stays on the chip.
    """
    entry, computations = _parse(hlo_text)
    instructions = computations[entry]
    custom = other = 0
    for instruction in instructions.values():
        if instruction.opcode in _FREE:
            continue
        operands = _operand_bytes(instruction.operands, instructions)
        size = operands + sum(_shapes(instruction.type))
        if instruction.opcode == "custom-call":
            custom += size
        else:
            other += size
    return custom, other


class _Counter:
    """Adds up computations from the entry downwards, each once."""

    def __init__(self, computations: dict[str, dict[str, _Instruction]], devices: int):
        self._computations = computations
        self._devices = devices
        self._done: dict[str, Totals] = {}
        self._chains: set[tuple[str, str]] = set()

    def totals(self, name: str) -> Totals:
        if name not in self._done:
            totals: Totals = {}
            instructions = self._computations.get(name, {})
            for instruction in instructions.values():
                totals = _add(totals, self._of(instruction, instructions))
            self._done[name] = _as_scatter(totals) if _scatters(name) else totals
        return self._done[name]

    def _of(
        self, instruction: _Instruction, siblings: dict[str, _Instruction]
    ) -> Totals:
        _, opcode, _, attributes = instruction
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            if self._continues_chain(kind, attributes):
                return {}
            return {kind: self._collective(kind, instruction, siblings)}
        if opcode == "while":
            body = self.totals(_called(attributes, "body")[0])
            n = _trip_count(instruction, siblings, self._computations)
            return _inexact(body) if n is None else _times(body, n)
        if opcode == "conditional":
            names = _called(attributes, "branch_computations")
            names += _called(attributes, "true_computation")
            names += _called(attributes, "false_computation")
            return _costliest([self.totals(name) for name in names])
        # The reducer of a reduction (`to_apply`) holds none. `async-done` names the
        # computation that `async-start` has run.
        names = []
        if opcode in ("fusion", "async-start", "custom-call"):
            names = _called(attributes, "calls")
        elif opcode == "call":
            names = _called(attributes, "to_apply")
        totals: Totals = {}
        for name in names:
            totals = _add(totals, self.totals(name))
        return totals

    def _continues_chain(self, kind: str, attributes: str) -> bool:
        """Whether this is a later part of a collective that is counted already."""
        if not (found := re.search(r'chain_id="(\w+)"', attributes)):
            return False
        chain = kind, found[1]
        known = chain in self._chains
        self._chains.add(chain)
        return known

    def _collective(
        self, kind: str, instruction: _Instruction, siblings: dict[str, _Instruction]
    ) -> Collective:
        operands = _operand_bytes(instruction.operands, siblings)
        results = _result_bytes(instruction, operands)
        whole = max(operands, results)
        n = self._group_size(instruction.attributes)
        sent = whole * (n - 1) // n
        if kind == "all-reduce":
            sent *= 2
        elif kind in ("collective-permute", "collective-broadcast"):
            sent = operands
        return Collective(1, whole, sent, True)

    def _group_size(self, attributes: str) -> int:
        """Devices that take part together; all of them if the text names no groups."""
        if found := re.search(r"replica_groups=\{\{([\d,\s]*)\}", attributes):
            return len(found[1].split(","))
        if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
            return int(found[1])
        if found := re.search(
            r"replica_groups=.*?mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes
        ):
            sizes = dict(re.findall(r"['\"]?(\w+)['\"]?=(\d+)", found[1]))
            axes = re.findall(r"\w+", found[2])
            return prod(int(sizes[axis]) for axis in axes)
        return self._devices


def _parse(text: str) -> tuple[str, dict[str, dict[str, _Instruction]]]:
    """The entry's name, and the instructions of all computations by name."""
    entry = ""
    computations: dict[str, dict[str, _Instruction]] = {}
    current: dict[str, _Instruction] = {}
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            current[found[1]] = _instruction(found[2])
        elif found := _COMPUTATION.match(line):
            current = computations[found[2]] = {}
            entry = found[2] if found[1] else entry
    return entry, computations


def _instruction(text: str) -> _Instruction:
    """Splits `type opcode(operands), attributes`."""
    if text.startswith("("):
        type_, rest = _parenthesised(text)
    else:
        type_, _, rest = text.partition(" ")
    opcode, _, rest = rest.strip().partition("(")
    operands, attributes = _parenthesised("(" + rest)
    return _Instruction(type_, opcode, operands[1:-1], attributes)


def _parenthesised(text: str) -> tuple[str, str]:
    """Splits the leading parenthesis off; layouts may hold parentheses of their own."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return text[: found.end()], text[found.end() :]
    return text, ""


def _operand_bytes(operands: str, siblings: dict[str, _Instruction]) -> int:
    """Sums up operands, whose types stand beside them or where they are made."""
    if _SHAPE.search(operands):
        return sum(_shapes(operands))
    made = [siblings[n].type for n in _names(operands) if n in siblings]
    return sum(_shapes(" ".join(made)))


def _result_bytes(instruction: _Instruction, operands: int) -> int:
    """Bytes of the results. Some starts return their operands and marks beside them."""
    sizes = list(_shapes(instruction.type))
    opcode = instruction.opcode
    if not opcode.endswith("-start") or opcode == "all-reduce-start":
        return sum(sizes)
    if opcode == "collective-permute-start":
        return operands
    return sum(sizes) - operands


def _shapes(text: str) -> Iterator[int]:
    """Bytes of every array type in the text, in order."""
    for dtype, dims in _SHAPE.findall(text):
        numbers = [int(d) for d in re.findall(r"\d+", dims)]
        yield -(-prod(numbers) * _bits(dtype) // 8)


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z](\d+)", dtype)  # f32, s8, u4, f8e4m3fn
    return int(found[1]) if found else 0


def _names(operands: str) -> list[str]:
    """Names of the operands, without types, layouts and comments."""
    bare = re.sub(r"/\*.*?\*/|\{[^}]*\}", "", _SHAPE.sub("", operands))
    return re.findall(r"[\w.\-]+", bare)


def _trip_count(
    loop: _Instruction,
    siblings: dict[str, _Instruction],
    computations: dict[str, dict[str, _Instruction]],
) -> int | None:
    """How often a loop runs; None if neither XLA nor its counter tells."""
    attributes = loop.attributes
    if found := re.search(r'"known_trip_count":\{"n":"?(\d+)"?\}', attributes):
        return int(found[1])
    condition = computations.get(_called(attributes, "condition")[0], {})
    body = computations.get(_called(attributes, "body")[0], {})
    start = siblings.get(_names(loop.operands)[0])
    if not condition or not body or start is None or start.opcode != "tuple":
        return None
    test, update = list(condition.values())[-1], list(body.values())[-1]
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    left, right = _names(test.operands)
    counter = condition.get(left)
    found = re.search(r"index=(\d+)", counter.attributes) if counter else None
    if found is None or update.opcode != "tuple":
        return None
    i = int(found[1])
    step = body.get(_names(update.operands)[i])
    steps = [_constant(n, body) for n in _names(step.operands)] if step else []
    stop, first = (
        _constant(right, condition),
        _constant(_names(start.operands)[i], siblings),
    )
    if step is None or step.opcode != "add" or 1 not in steps:
        return None
    return None if stop is None or first is None else max(0, stop - first)


def _constant(name: str, computation: dict[str, _Instruction]) -> int | None:
    """The integer that an instruction copies or is."""
    made = computation.get(name)
    while made is not None and made.opcode == "copy":
        made = computation.get(_names(made.operands)[0])
    if made is None or made.opcode != "constant":
        return None
    return int(made.operands) if re.fullmatch(r"-?\d+", made.operands) else None


def _called(attributes: str, name: str) -> list[str]:
    found = re.search(rf"\b{name}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", attributes)
    return re.findall(r"[\w.\-]+", found[1] or found[2]) if found else []


def _devices(text: str) -> int:
    """Devices that run the module, by its header."""
    header = text.lstrip().partition("\n")[0]
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    return prod(int(n) for n in counts)


def _add(a: Totals, b: Totals) -> Totals:
    total = dict(a)
    for kind, new in b.items():
        old = total.get(kind, _NONE)
        total[kind] = Collective(
            old.runs + new.runs,
            old.bytes + new.bytes,
            old.sent_bytes + new.sent_bytes,
            old.exact and new.exact,
        )
    return total


def _times(totals: Totals, n: int) -> Totals:
    return {
        kind: Collective(n * one.runs, n * one.bytes, n * one.sent_bytes, one.exact)
        for kind, one in totals.items()
    }


def _scatters(computation: str) -> bool:
    """TPU's reduce-scatter is written as an all-reduce and a slice, fused."""
    return computation.startswith("all-reduce-scatter")


def _as_scatter(totals: Totals) -> Totals:
    """All-reduces as the reduce-scatters that they are, which send half as much."""
    kinds = dict(totals)
    if (found := kinds.pop("all-reduce", None)) is None:
        return totals
    half = found._replace(sent_bytes=found.sent_bytes // 2)
    return _add(kinds, {"reduce-scatter": half})


def _inexact(totals: Totals) -> Totals:
    return {kind: one._replace(exact=False) for kind, one in totals.items()}


def _costliest(branches: list[Totals]) -> Totals:
    """For each kind the branch that moves most; exact if all branches agree."""
    largest: Totals = {}
    for kind in {kind for branch in branches for kind in branch}:
        ones = [branch.get(kind, _NONE) for branch in branches]
        exact = all(one == ones[0] for one in ones)
        most = max(ones, key=lambda one: one.bytes)
        largest[kind] = most._replace(exact=exact and most.exact)
    return largest
