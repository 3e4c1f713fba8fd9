# SPDX-License-Identifier: Apache-2.0
"""The commands of a shell script with its variables filled in, as far as the script gives them.

Read are assignments, arrays, `${NAME:-default}`, `$((sums))`, and `if` with comparisons of words. A
value that stands elsewhere (an argument, the environment, the output of a command) stays as it is
written, `$NAME`: whoever reads a flag with it says so. Loops and `case` read arguments, of which
there are none, so they are passed over. Nothing is run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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

_ASSIGNMENT = re.compile(r"(?s)([A-Za-z_]\w*)(\+?)=(.*)")
_LOOPS = {"for": "done", "while": "done", "until": "done", "case": "esac", "select": "done"}
_PREFIXES = ("export", "declare", "local", "readonly", "eval", "exec", "time", "then", "do", "{")
_ENDS = (NEWLINE, ";", "&", "&&", "||", "|", ";;", "(", ")")
_SIGNS = {"-eq": (0,), "-ne": (-1, 1), "-gt": (1,), "-lt": (-1,), "-ge": (0, 1), "-le": (-1, 0)}
"""Which signs of a difference a comparison takes."""


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


def script_commands(text: str) -> list[list[str]]:
    """Return the words of each command that a script would run; ValueError where it is none."""
    return _Script(tokens=split_tokens(text)).run()


@dataclass(slots=True)
class _Script:
    """Walk through the tokens of a script, keeping its variables."""

    tokens: Sequence[Token]
    variables: Variables = field(default_factory=Variables)
    commands: list[list[str]] = field(default_factory=list[list[str]])
    place: int = 0

    def run(self) -> list[list[str]]:
        """Return the commands."""
        while self.place < len(self.tokens):
            self._statement(active=True)
        return self.commands

    def _statement(self, *, active: bool) -> None:
        """Read one statement; where it is not `active`, without effect."""
        token = self.tokens[self.place]
        if token.operator:
            self.place += _tokens_of(token)
        elif token.text == "if":
            self._branches(active)
        elif token.text in _LOOPS:
            self._skip_to(_LOOPS[token.text], token.text)
        else:
            self._command(active)

    def _skip_to(self, end: str, start: str) -> None:
        depth = 0
        while self.place < len(self.tokens):
            text = self.tokens[self.place].text
            depth += (text in _LOOPS and _LOOPS[text] == end) - (text == end)
            self.place += 1
            if depth == 0:
                return

    def _branches(self, active: bool) -> None:
        """Read `if` to `fi`: the first branch whose condition holds counts."""
        chosen = False
        while self.place < len(self.tokens):
            word = self.tokens[self.place].text
            self.place += 1
            if word == "fi":
                return
            holds = not chosen
            if word in ("if", "elif"):
                condition = self._until("then")
                self.place += 1
                holds = active and not chosen and self._holds(condition)
            chosen = chosen or holds
            while self.place < len(self.tokens) and self.tokens[self.place].text not in (
                "elif",
                "else",
                "fi",
            ):
                self._statement(active=active and holds)

    def _until(self, end: str) -> list[Token]:
        start = self.place
        while self.place < len(self.tokens) and self.tokens[self.place].text != end:
            self.place += 1
        return list(self.tokens[start : self.place])

    def _holds(self, condition: Sequence[Token]) -> bool:
        """Return whether a condition holds; one about files or commands does not."""
        result, joined, part = False, "||", list[str]()
        for token in [*condition, Token(text=";", operator=True)]:
            if not token.operator:
                part.extend(self.variables.fill(token.text, unset="") or [""])
            elif part:
                found = _compare(part)
                result = (result or found) if joined == "||" else (result and found)
                part.clear()
            if token.operator and token.text in ("||", "&&"):
                joined = token.text
        return result

    def _command(self, active: bool) -> None:
        """Read assignments and words up to the end of a command."""
        words: list[str] = []
        assigned: list[str] = []
        started = False
        while self.place < len(self.tokens):
            token = self.tokens[self.place]
            if token.operator:
                if token.text in _ENDS:
                    break
                self.place += _tokens_of(token)
                continue
            self.place += 1
            match = None if started else _ASSIGNMENT.fullmatch(token.text)
            if match:
                self._assign(match[1], bool(match[2]), match[3], active)
                assigned.append(f"{match[1]}={match[3]}")
            elif started or token.text not in _PREFIXES:
                started = True
                words.extend(self.variables.fill(token.text))
        if words and active:
            self.commands.append([*assigned, *words])

    def _assign(self, name: str, more: bool, value: str, active: bool) -> None:
        if value == "" and self.place < len(self.tokens) and self.tokens[self.place].text == "(":
            self.place += 1
            items = [token.text for token in self._until(")") if not token.operator]
            self.place += 1
            if active:
                filled = [word for item in items for word in self.variables.fill(item)]
                self.variables.set_array(name, filled, more)
        elif active:
            self.variables.set_word(name, " ".join(self.variables.fill(value, split=False)), more)


def _tokens_of(operator: Token) -> int:
    """Return how many tokens an operator takes: behind a redirection stands the file."""
    return 1 if operator.text in _ENDS or operator.text[-1].isdigit() else 2


def _compare(words: Sequence[str]) -> bool:
    """Return whether a comparison in brackets holds; False where it cannot be told."""
    plain = [word for word in words if word not in ("[[", "]]", "[", "]", "test")]
    match plain:
        case ["!", *rest]:
            return bool(rest) and rest[0] not in ("-f", "-d", "-e") and not _compare(rest)
        case ["-n", word]:
            return word != ""
        case ["-z", word]:
            return word == ""
        case ["-z"]:
            return True
        case [left, "=" | "==", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
        case [left, operator, right] if operator in _SIGNS:
            return _compare_numbers(left, operator, right)
        case _:
            return False


def _compare_numbers(left: str, operator: str, right: str) -> bool:
    if not all(re.fullmatch(r"-?\d{1,18}", word) for word in (left, right)):
        return False
    sign = (int(left) > int(right)) - (int(left) < int(right))
    return sign in _SIGNS[operator]
