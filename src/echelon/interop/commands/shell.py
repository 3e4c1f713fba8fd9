# SPDX-License-Identifier: Apache-2.0
"""The commands of a shell script with its variables filled in, as far as the script gives them.

Read are assignments, arrays, `${NAME:-default}`, `$((sums))`, and `if` with comparisons of words. A
value that stands elsewhere (an argument, the environment, the output of a command) stays as it is
written, `$NAME`: whoever reads a flag with it says so. Loops and `case` read arguments, of which
there are none, so they are passed over. Nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from echelon.interop.commands.shell_words import NEWLINE, Token, Variables, split_tokens

_ASSIGNMENT = re.compile(r"(?s)([A-Za-z_]\w*)(\+?)=(.*)")
_LOOPS = {"for": "done", "while": "done", "until": "done", "case": "esac", "select": "done"}
_PREFIXES = ("export", "declare", "local", "readonly", "eval", "exec", "time", "then", "do", "{")
_ENDS = (NEWLINE, ";", "&", "&&", "||", "|", ";;", "(", ")")
_SIGNS = {
    "-eq": (0,),
    "-ne": (-1, 1),
    "-gt": (1,),
    "-lt": (-1,),
    "-ge": (0, 1),
    "-le": (-1, 0),
}
"""Which signs of a difference a comparison takes."""


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
