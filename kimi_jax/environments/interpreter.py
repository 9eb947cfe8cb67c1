"""A tiny language of whole numbers, and its interpreter.

    use a                   functions of file a may be called
    fn area x y             a function
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

Lines that are empty or begin with # say nothing; how a line is indented does not
matter. Operators are + - * / % < > == with the usual binding, / and % round down,
comparisons give 0 or 1, and what is not 0 is true. A function that ends without ret
gives 0. Every run has limits, of steps, depth and the size of numbers; that of time is
the one of steps, which is the same on every machine. A program can reach nothing but
its own numbers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_WORD = re.compile(r"\s*(\d+|[a-z]\w*|==|[-+*/%<>(),])", re.ASCII)
_NAME = re.compile(r"[a-z]\w*", re.ASCII)
_KEYWORDS = {"use", "fn", "end", "if", "else", "while", "ret"}
_LEVELS = (("<", ">", "=="), ("+", "-"), ("*", "/", "%"))
_LARGEST = 10**15
_DIGITS = 15
_NESTED = 20  # brackets and signs within each other, and blocks


class Fault(Exception):
    """A program that cannot be read or run; `where` is file and line."""

    def __init__(self, file: str, line: int, what: str):
        super().__init__(f"{file} {line}: {what}")
        self.file, self.line, self.what = file, line, what


class Limits(NamedTuple):
    """Of one call from outside."""

    steps: int = 2_000  # lines and operations
    depth: int = 200  # calls, blocks and parts of expressions within each other


_LIMITS = Limits()


class Statement(NamedTuple):
    """One line that does something."""

    kind: str  # "set", "ret", "if", "while"
    line: int
    name: str  # of a variable that is set
    value: Any  # expression, see `_Reader`
    body: list[Statement]
    other: list[Statement]


class Function(NamedTuple):
    """Where and what."""

    file: str
    line: int
    arguments: tuple[str, ...]
    body: list[Statement]


@dataclasses.dataclass
class Module:
    """A file that has been read."""

    uses: list[tuple[int, str]]
    functions: dict[str, Function]


class Program:
    """Files of source lines, ready to be called.

    Raises:
      Fault: a line that is not of the language.
    """

    def __init__(self, files: Mapping[str, Sequence[str]]):
        self._modules = {
            name: _Parser(name, lines).module() for name, lines in files.items()
        }
        for name, module in self._modules.items():
            for line, used in module.uses:
                if used not in self._modules:
                    raise Fault(name, line, f"no file {used}")

    def call(
        self,
        file: str,
        function: str,
        arguments: Sequence[int],
        limits: Limits = _LIMITS,
    ) -> int:
        """What a function of a file gives.

        Raises:
          Fault: no such function, a name without a value, division by zero, or a
            limit is passed.
        """
        return _Run(self._modules, limits).call(file, 0, function, list(arguments), 0)


class _Run:
    """One call from outside: counts its steps."""

    def __init__(self, modules: Mapping[str, Module], limits: Limits):
        self._modules, self._limits, self._steps = modules, limits, 0

    def call(
        self, file: str, line: int, name: str, arguments: list[int], depth: int
    ) -> int:
        function = self._find(file, line, name)
        if len(arguments) != len(function.arguments):
            wanted = len(function.arguments)
            raise Fault(file, line, f"{name} takes {wanted} not {len(arguments)}")
        names = dict(zip(function.arguments, arguments, strict=True))
        given = self._block(function.file, function.body, names, depth + 1)
        return 0 if given is None else given

    def _find(self, file: str, line: int, name: str) -> Function:
        if file not in self._modules:
            raise Fault(file, line, "no such file")
        module = self._modules[file]
        for home in [file, *(used for _, used in module.uses)]:
            if name in self._modules[home].functions:
                return self._modules[home].functions[name]
        raise Fault(file, line, f"no {name}")

    def _block(
        self, file: str, body: list[Statement], names: dict[str, int], depth: int
    ) -> int | None:
        """Runs statements; what they return, None if they do not."""
        for statement in body:
            given: int | None = None
            where = file, statement.line
            value = self._value(*where, statement.value, names, depth + 1)
            if statement.kind == "ret":
                return value
            if statement.kind == "set":
                names[statement.name] = value
            elif statement.kind == "if":
                chosen = statement.body if value else statement.other
                given = self._block(file, chosen, names, depth + 1)
            else:
                while value and given is None:
                    given = self._block(file, statement.body, names, depth + 1)
                    value = self._value(*where, statement.value, names, depth + 1)
            if given is not None:
                return given
        return None

    def _value(
        self, file: str, line: int, expression: Any, names: dict[str, int], depth: int
    ) -> int:
        self._steps += 1
        if self._steps > self._limits.steps:
            raise Fault(file, line, "too many steps")
        if depth > self._limits.depth:
            raise Fault(file, line, "too deep")
        if isinstance(expression, int):
            return expression
        if isinstance(expression, str):
            if expression not in names:
                raise Fault(file, line, f"no {expression}")
            return names[expression]
        operator, *parts = expression
        values = [self._value(file, line, part, names, depth + 1) for part in parts]
        if operator not in _OPERATIONS:
            return self.call(file, line, operator, values, depth + 1)
        if operator in "/%" and values[1] == 0:
            raise Fault(file, line, "division by zero")
        value = _OPERATIONS[operator](*values)
        if abs(value) > _LARGEST:
            raise Fault(file, line, "number too large")
        return value


_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "==": lambda a, b: int(a == b),
}


class _Parser:
    """The lines of one file."""

    def __init__(self, file: str, lines: Sequence[str]):
        self._file, self._lines, self._at = file, lines, 0

    def module(self) -> Module:
        found = Module([], {})
        while (words := self._next()) is not None:
            match words:
                case ["use", name]:
                    found.uses.append((self._at, name))
                case ["fn", name, *arguments]:
                    self._check_names(name, *arguments)
                    if name in found.functions:
                        raise self._fault(f"{name} twice")
                    line = self._at
                    body, _ = self._body(0)
                    made = Function(self._file, line, tuple(arguments), body)
                    found.functions[name] = made
                case _:
                    raise self._fault("want use or fn")
        return found

    def _fault(self, what: str) -> Fault:
        return Fault(self._file, self._at, what)

    def _next(self) -> list[str] | None:
        """The words of the next line that says something; None: no more."""
        while self._at < len(self._lines):
            line = self._lines[self._at].strip()
            self._at += 1
            if line and not line.startswith("#"):
                return line.split()
        return None

    def _check_names(self, *names: str) -> None:
        for name in names:
            if not _NAME.fullmatch(name) or name in _KEYWORDS:
                raise self._fault("bad name")
        if len(set(names)) < len(names):
            raise self._fault("name twice")

    def _body(self, nested: int) -> tuple[list[Statement], str]:
        """Statements up to "end" or "else", and which of them it was."""
        if nested > _NESTED:
            raise self._fault("too deep")
        body: list[Statement] = []
        while (words := self._next()) is not None:
            line, text = self._at, " ".join(words[1:])
            match words:
                case ["end" | "else" as last]:
                    if last == "else" and not nested:
                        raise self._fault("else without if")
                    return body, last
                case ["ret", *_]:
                    body.append(Statement("ret", line, "", self._read(text), [], []))
                case ["if" | "while" as kind, *_]:
                    body.append(self._branch(kind, line, text, nested + 1))
                case [name, "=", *_]:
                    self._check_names(name)
                    value = self._read(" ".join(words[2:]))
                    body.append(Statement("set", line, name, value, [], []))
                case _:
                    raise self._fault("unclear line")
        raise self._fault("end missing")

    def _branch(self, kind: str, line: int, text: str, nested: int) -> Statement:
        condition = self._read(text)
        body, last = self._body(nested)
        other: list[Statement] = []
        if last == "else":
            if kind == "while":
                raise self._fault("else without if")
            other, last = self._body(nested)
            if last == "else":
                raise self._fault("else twice")
        return Statement(kind, line, "", condition, body, other)

    def _read(self, text: str) -> Any:
        words, at = [], 0
        while at < len(text):
            match = _WORD.match(text, at)
            if match is None:
                raise self._fault("unclear line")
            words.append(match[1])
            at = match.end()
        reader = _Reader(words, self._fault)
        expression = reader.level(0, 0)
        if reader.words:
            raise self._fault("unclear line")
        return expression


class _Reader:
    """Words to an expression: a number, a name, or (operator or function, parts)."""

    def __init__(self, words: list[str], fault: Callable[[str], Fault]):
        self.words, self._fault = words[::-1], fault

    def level(self, level: int, nested: int) -> Any:
        if nested > _NESTED:
            raise self._fault("too deep")
        if level == len(_LEVELS):
            return self._atom(nested)
        left = self.level(level + 1, nested)
        chained = 0
        while self.words and self.words[-1] in _LEVELS[level]:
            operator = self.words.pop()
            left = (operator, left, self.level(level + 1, nested))
            chained += 1
            if chained > _NESTED:
                raise self._fault("too long")
        return left

    def _atom(self, nested: int) -> Any:
        word = self.words.pop() if self.words else ""
        if word.isdigit():
            if len(word) > _DIGITS:
                raise self._fault("number too large")
            return int(word)
        if word == "-":
            return ("-", 0, self._atom_within(nested))
        if word == "(":
            inside = self.level(0, nested + 1)
            self._take(")")
            return inside
        if not _NAME.fullmatch(word) or word in _KEYWORDS:
            raise self._fault("unclear line")
        if not self.words or self.words[-1] != "(":
            return word
        self._take("(")
        parts: list[Any] = []
        while self.words and self.words[-1] != ")":
            if parts:
                self._take(",")
            parts.append(self.level(0, nested + 1))
        self._take(")")
        return (word, *parts)

    def _atom_within(self, nested: int) -> Any:
        if nested >= _NESTED:
            raise self._fault("too deep")
        return self._atom(nested + 1)

    def _take(self, word: str) -> None:
        if not self.words or self.words.pop() != word:
            raise self._fault(f"{word} missing")
