# SPDX-License-Identifier: Apache-2.0
"""The words of a shell script: cut apart as a shell does, and their variables filled in."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

NEWLINE = "\n"
_OPERATORS = re.compile(r"&>>|&>|\d?>>&?|\d?>&\d?|\d?>|<<<|<<|<|&&|\|\||;;|[;&|()\n]")
_CONTINUED = re.compile(r"\\[ \t]*(#[^\n]*)?\r?\n([ \t]*#[^\n]*\n)*")
_BEFORE_FLAG = re.compile(r"\n(?=\s*(#.*\n\s*)*--\w)")
_NAME = re.compile(r"\$(\w+|[#@*?!$-])")
_BRACES = re.compile(
    r"(?s)(?P<name>\w+)(?P<all>\[[@*]\])?(?:(?P<how>:?[-=+])(?P<other>.*)|(?P<cut>[%#/:^,].*))?"
)
_SUMS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_LARGEST = 10**15  # in sums of a shell
_SEPARATOR = "\0"


@dataclass(frozen=True, slots=True)
class Token:
    """Hold a word with its quotes and variables, or an operator."""

    text: str
    operator: bool = False


def split_tokens(text: str) -> list[Token]:
    """Return the words and operators of a script; ValueError where a quotation does not end.

    A line that begins with a flag goes on with the command before it.
    """
    return list(_tokens(_CONTINUED.sub(" ", text)))


def _tokens(text: str) -> Iterator[Token]:
    place, word = 0, ""
    while place < len(text):
        rest = text[place:]
        if not word and rest[0] == "#":
            place += len(rest.partition(NEWLINE)[0])
        elif (size := _opaque(rest)) > 0:
            word += rest[:size]
            place += size
        elif rest[0] in " \t\r" or _BEFORE_FLAG.match(rest):
            if word:
                yield Token(word)
            word = ""
            place += 1
        elif (match := _OPERATORS.match(rest)) and not (word and match[0][0].isdigit()):
            if word:
                yield Token(word)
            word = ""
            yield Token(match[0], operator=True)
            place += match.end()
        else:
            word += rest[0]
            place += 1
    if word:
        yield Token(word)


def _opaque(text: str) -> int:
    """Return the length of the quotation or expansion that a text begins with; 0 for none."""
    if text[0] == "\\":
        return min(2, len(text))
    if text[0] in "'`":
        end = text.find(text[0], 1)
        if end < 0:
            raise ValueError(f"a quotation {text[:20]!r} does not end")
        return end + 1
    if text[0] == '"':
        return _closing(text, 1, '"') + 1
    if text.startswith("${"):
        return _closing(text, 2, "}") + 1
    if text.startswith("$("):
        return _closing(text, 2, ")") + 1
    if text.startswith("(["):  # A pattern of layers, which Megatron-LM's own examples do not quote.
        return _closing(text, 1, ")") + 1
    return 0


def _closing(text: str, start: int, end: str) -> int:
    """Return where what began before `start` ends."""
    place, depth = start, 0
    while place < len(text):
        character = text[place]
        if character == end and depth == 0:
            return place
        if character == "\\":
            place += 1
        elif end == ")" and character in "()":
            depth += 1 if character == "(" else -1
        elif (character == "$" and text[place + 1 : place + 2] in ("{", "(")) or (
            character in "'\"" and end != '"'
        ):
            place += _opaque(text[place:]) - 1
        place += 1
    raise ValueError(f"a quotation {text[:20]!r} does not end")


@dataclass(slots=True)
class Variables:
    """Hold the variables of a script; an array is a list of words."""

    values: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def set_word(self, name: str, value: str, more: bool) -> None:
        """Set a variable, or add to its text."""
        before = " ".join(self.values.get(name, [])) if more else ""
        self.values[name] = [before + value]

    def set_array(self, name: str, values: list[str], more: bool) -> None:
        """Set an array, or add to it."""
        self.values[name] = [*(self.values.get(name, []) if more else []), *values]

    def fill(self, raw: str, *, split: bool = True, unset: str | None = None) -> list[str]:
        """Return the words that a word becomes; what has no value is `unset`, or stays as it is."""
        text = "".join(self._parts(raw, quoted=not split, unset=unset))
        words = text.split(_SEPARATOR)
        empty = '""' in raw or "''" in raw
        return [word for word in words if word] or ([""] if empty else [])

    def _parts(self, raw: str, *, quoted: bool, unset: str | None) -> Iterator[str]:
        place = 0
        while place < len(raw):
            rest = raw[place:]
            size = max(1, _opaque(rest))
            match = _NAME.match(rest)
            if rest[0] == "\\" and (not quoted or rest[1:2] in ('"', "\\", "$")):
                yield rest[1:size]
            elif rest[0] == "'":
                yield rest[1 : size - 1]
            elif rest[0] == '"':
                yield from self._parts_quoted(rest[1 : size - 1], unset)
            elif rest.startswith("$(("):
                yield self._sum(rest[3 : size - 2], rest[:size])
            elif rest.startswith("(["):
                yield from ("(", *self._parts(rest[1:size], quoted=quoted, unset=unset))
            elif rest.startswith("${"):
                yield self._value(rest[2 : size - 1], rest[:size], quoted, unset)
            elif match and not rest.startswith("$("):
                size = match.end()
                yield self._plain(match[1], match[0], quoted, unset)
            else:
                yield rest[:size]
            place += size

    def _parts_quoted(self, inner: str, unset: str | None) -> Iterator[str]:
        """Yield the parts of a text in double quotes, where a single quote is only a character."""
        for part in re.split(r"(')", inner):
            yield from [part] if part == "'" else self._parts(part, quoted=True, unset=unset)

    def _plain(self, name: str, raw: str, quoted: bool, unset: str | None) -> str:
        values = self.values.get(name)
        if values is None:
            return raw if unset is None else unset
        text = " ".join(values)
        return text if quoted else _SEPARATOR.join(text.split())

    def _value(self, inner: str, raw: str, quoted: bool, unset: str | None) -> str:
        match = _BRACES.fullmatch(inner)
        if match is None or match["cut"]:
            return raw if unset is None else unset
        values = self.values.get(match["name"])
        how = match["how"] or ""
        missing = values is None or (how.startswith(":") and not "".join(values))
        if missing and how.endswith(("-", "=")):
            return _SEPARATOR.join(self.fill(match["other"], split=not quoted, unset=unset))
        if how.endswith("+"):
            other = self.fill(match["other"], split=not quoted, unset=unset)
            return "" if missing else _SEPARATOR.join(other)
        if values is not None and match["all"]:
            words = values if quoted else [word for value in values for word in value.split()]
            return _SEPARATOR.join(words)
        return self._plain(match["name"], raw, quoted, unset)

    def _sum(self, inner: str, raw: str) -> str:
        text = "".join(self._parts(inner, quoted=True, unset=None))
        names = re.sub(r"[A-Za-z_]\w*", lambda m: " ".join(self.values.get(m[0], [m[0]])), text)
        try:
            return str(_evaluate(ast.parse(names.strip().replace("/", "//"), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return raw


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if abs(value) < _LARGEST:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_evaluate(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SUMS:
            return _SUMS[type(op)](_evaluate(left), _evaluate(right))
        case _:
            raise ValueError("no whole number")
