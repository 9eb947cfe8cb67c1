"""The tiny language against Python's own arithmetic, and its limits."""

import time

import pytest

from kimi_jax.environments.interpreter import Fault, Limits, Program

HALF = ["fn half x", "  ret x / 2", "end"]
MAIN = """
use a
# everything the language has
fn area x y
  z = x * y + half(x)
  if z < 10
    ret 10
  else
    z = z - 1
  end
  while z > 100
    z = z / 2
  end
  ret z
end
fn power x n
  if n == 0
    ret 1
  end
  ret x * power(x, n - 1)
end
fn nothing
end
fn again x
  ret again(x + 1)
end
fn forever
  while 1
  end
end
fn grow x
  while 1
    x = x * x
  end
end
""".splitlines()


def area(x: int, y: int) -> int:
    z = x * y + x // 2
    if z < 10:
        return 10
    z -= 1
    while z > 100:
        z //= 2
    return z


def value(expression: str, x: int = 7) -> int:
    return Program({"a": ["fn f x", f"ret {expression}", "end"]}).call("a", "f", [x])


@pytest.fixture(scope="module")
def program() -> Program:
    return Program({"a": HALF, "b": MAIN})


@pytest.mark.parametrize(("x", "y"), [(1, 2), (3, 4), (50, 60), (-5, 9), (10, 10)])
def test_programs_compute(program: Program, x: int, y: int) -> None:
    assert program.call("b", "area", [x, y]) == area(x, y)


def test_functions_call_themselves_and_may_give_nothing(program: Program) -> None:
    assert program.call("b", "power", [3, 9]) == 3**9
    assert program.call("b", "nothing", []) == 0


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("1 + 2 * 3 - 4", 3),
        ("(1 + 2) * (3 - 4)", -3),
        ("10 - 3 - 2", 5),
        ("-7 / 2", -4),
        ("-7 % 3", 2),
        ("- -x", 7),
        ("x < 8", 1),
        ("x > 8", 0),
        ("1 + 1 == 2", 1),
        ("2 * x == x + x", 1),
        ("100 / 7 % 5", 4),
    ],
)
def test_operators_bind_as_usual(expression: str, wanted: int) -> None:
    assert value(expression) == wanted


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        ("again", [1], "b 25: too deep"),
        ("forever", [], "b 28: too many steps"),
        ("grow", [7], "b 33: number too large"),
        ("area", [1], "b 0: area takes 2 not 1"),
        ("none", [], "b 0: no none"),
    ],
)
def test_limits(program: Program, function: str, arguments: list, said: str) -> None:
    started = time.process_time()
    with pytest.raises(Fault) as caught:
        program.call("b", function, arguments)
    assert str(caught.value) == said
    assert time.process_time() - started < 0.5


def test_limits_are_exact() -> None:
    program = Program({"a": ["fn f", "ret 1 + 1", "end"]})
    assert program.call("a", "f", [], Limits(steps=3, depth=3)) == 2
    with pytest.raises(Fault, match="too many steps"):
        program.call("a", "f", [], Limits(steps=2))
    with pytest.raises(Fault, match="too deep"):
        program.call("a", "f", [], Limits(depth=2))


NESTED = "1"
for _ in range(19):
    NESTED = "(" + NESTED + "+1" * 19 + "*1" * 19 + "<1)"


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "ret",
        "ret 1 2",
        "ret $",
        "ret é",
        "ret ٣",
        "ret f(1,)",
        "ret f(,1)",
        "ret f(1 2)",
        "ret (1",
        "ret 1)",
        "ret " + "(" * 5000,
        "ret " + "-" * 5000 + "1",
        "ret 1" + "+1" * 5000,
        "ret " + NESTED,
        "ret " + "9" * 20,
        "ret __import__",
        "ret x.real",
        "ret y",
        "ret x / 0",
        "ret x % 0",
        "if 1",
        "else",
        "fn g",
        "use a",
        "= 3",
        "ret = 3",
        "X = 3",
    ],
)
def test_lines_that_mean_nothing_are_faults(line: str) -> None:
    # Python's own limit of recursion must never be what ends a program.
    with pytest.raises(Fault, match=r"^a \d: "):
        Program({"a": ["fn f x", line, "end"]}).call("a", "f", [1])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["use b"], "a 1: no file b"),
        (["fn f", "end", "fn f", "end"], "a 3: f twice"),
        (["fn f x x", "end"], "a 1: name twice"),
        (["fn end", "end"], "a 1: bad name"),
        (["fn f"], "a 1: end missing"),
        (["ret 1"], "a 1: want use or fn"),
        (["fn f", "while 0", "else", "end", "end"], "a 3: else without if"),
        (["fn f", "if 0", "else", "else", "end", "end"], "a 4: else twice"),
        (["fn f", *["if 1"] * 30, *["end"] * 31], "a 22: too deep"),
    ],
)
def test_files_that_are_wrong(lines: list[str], said: str) -> None:
    with pytest.raises(Fault) as caught:
        Program({"a": lines})
    assert str(caught.value) == said


def test_functions_of_files_that_are_not_used_are_unknown() -> None:
    files = {"a": HALF, "b": ["fn f x", "ret half(x)", "end"], "c": ["use b"]}
    with pytest.raises(Fault, match="b 2: no half"):
        Program(files).call("b", "f", [1])
    with pytest.raises(Fault, match="c 0: no half"):
        Program(files).call("c", "half", [1])
    with pytest.raises(Fault, match="no such file"):
        Program(files).call("d", "half", [1])
