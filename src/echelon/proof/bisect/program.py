# SPDX-License-Identifier: Apache-2.0
"""Find the smallest program of a user's file that fails as the file does, by halving.

What may be made smaller are the numbers that stand at the top of the file: the degrees of its MESH,
and every other constant in capitals (microbatches, layers, ...). Each candidate is the file with
other numbers, beside copies of the files that it may import; it fails as the file does where the
same rule is broken. One whose code raises does not.
"""

from __future__ import annotations

import ast
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from echelon.core.errors import EchelonError
from echelon.proof.bisect.verdict import Bisection, NeededPart, halves
from echelon.proof.causes.finding import Diagnosis
from echelon.proof.verdict import SubjectProof

VerifyProgram = Callable[[str], SubjectProof]
"""Prove the program "FILE" or "FILE:function"."""

_KEPT = ("SEED",)
_STEPS = "NUM_STEPS"
_MESH = "MESH"

_Place = tuple[str, str]
"""A number of the file: the constant, and the axis within MESH or nothing."""


@dataclass(frozen=True, slots=True)
class _Number:
    """Hold where a number stands in the source, and which it is."""

    place: _Place
    line: int
    start: int
    end: int
    value: int

    @property
    def name(self) -> str:
        """Return how users know it."""
        constant, axis = self.place
        return f"{constant}[{axis!r}] = {self.value}" if axis else f"{constant} = {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """Hold how the proof of one candidate ended."""

    rule: str
    says: str
    diagnosis: Diagnosis | None = None


def bisect_program(subject: str, verify: VerifyProgram) -> Bisection | None:
    """Return the smallest program that breaks the rule that `subject` breaks; None where it holds.

    `subject` is "FILE" or "FILE:function".
    """
    return _ProgramSearch(subject, verify).run()


class _ProgramSearch:
    """Halve the numbers of one file."""

    def __init__(self, subject: str, verify: VerifyProgram) -> None:
        file, colon, function = subject.partition(":")
        self._file, self._function, self._verify = Path(file), colon + function, verify
        self._known: dict[str, _Attempt] = {}

    def run(self) -> Bisection | None:
        """Return the smallest program that fails as the file does."""
        source = self._file.read_text(encoding="utf-8")
        first = self._attempt(source)
        if not first.rule:
            return None
        before = {number.place: number for number in numbers_of(source)}
        while (smaller := self._smaller(source, first.rule)) is not None:
            source = smaller
        last = self._attempt(source)
        steps = 1 + max(0, last.diagnosis.step if last.diagnosis else 0)
        source = with_number(source, _STEPS, steps)
        after = {number.place: number for number in numbers_of(source)}
        return Bisection(
            rule=first.rule,
            needed=tuple(
                self._without(source, one, first.rule)
                for place, one in after.items()
                if one.value > 1 and place[0] != _STEPS
            ),
            left_out=tuple(
                one.name
                for place, one in before.items()
                if one.value > 1 and place in after and after[place].value == 1
            ),
            sizes={"ranks": _ranks(after), "steps": steps},
            files={self._file.name: source},
            diagnosis=last.diagnosis,
            summary=last.says,
            num_proofs=len(self._known),
        )

    def _smaller(self, source: str, rule: str) -> str | None:
        """Return the file with one number smaller, where it still fails so."""
        for number in numbers_of(source):
            for value in halves(number.value):
                candidate = _replaced(source, number, value)
                if number.place[0] != _STEPS and self._attempt(candidate).rule == rule:
                    return candidate
        return None

    def _without(self, source: str, number: _Number, rule: str) -> NeededPart:
        attempt = self._attempt(_replaced(source, number, 1))
        same = attempt.rule == rule
        says = "fails all the same" if same else (attempt.says if attempt.rule else "proven")
        return NeededPart(name=number.name, without=says)

    def _attempt(self, source: str) -> _Attempt:
        if source not in self._known:
            with tempfile.TemporaryDirectory(prefix="echelon-bisect-") as folder:
                for other in self._file.resolve().parent.glob("*.py"):
                    shutil.copy(other, folder)
                candidate = Path(folder, self._file.name)
                candidate.write_text(source, encoding="utf-8")
                self._known[source] = self._proven(f"{candidate}{self._function}")
        return self._known[source]

    def _proven(self, subject: str) -> _Attempt:
        try:
            found = self._verify(subject).diagnosis
        except EchelonError as error:
            return _Attempt(rule=error.rules[0], says=str(error).splitlines()[0])
        if found is None:
            return _Attempt(rule="", says="proven")
        return _Attempt(rule=found.rule, says=found.sentence(), diagnosis=found)


def numbers_of(source: str) -> list[_Number]:
    """Return the whole numbers that stand at the top of a file under names in capitals."""
    return list(_numbers(ast.parse(source)))


def _numbers(tree: ast.Module) -> Iterator[_Number]:
    for node in tree.body:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = node.targets[0]
        if not isinstance(target, ast.Name) or not target.id.isupper() or target.id in _KEPT:
            continue
        if target.id == _MESH and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield from _number((_MESH, key.value), value)
        else:
            yield from _number((target.id, ""), node.value)


def _number(place: _Place, node: ast.expr) -> Iterator[_Number]:
    # A bool is an int to Python, and one line is all that a number takes.
    if isinstance(node, ast.Constant) and type(node.value) is int:
        assert node.end_col_offset is not None, "a parsed file has places"
        yield _Number(place, node.lineno, node.col_offset, node.end_col_offset, node.value)


def _replaced(source: str, number: _Number, value: int) -> str:
    lines = source.splitlines(keepends=True)
    # Columns count bytes of UTF-8.
    line = lines[number.line - 1].encode()
    line = line[: number.start] + str(value).encode() + line[number.end :]
    lines[number.line - 1] = line.decode()
    return "".join(lines)


def with_number(source: str, constant: str, value: int) -> str:
    """Return the file with a constant of that value: replaced, or added at its end."""
    for number in numbers_of(source):
        if number.place == (constant, ""):
            return _replaced(source, number, value)
    return f"{source.rstrip()}\n\n\n{constant} = {value}\n"


def _ranks(numbers: Mapping[_Place, _Number]) -> int:
    return prod(one.value for (constant, _), one in numbers.items() if constant == _MESH)
