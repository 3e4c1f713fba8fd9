# SPDX-License-Identifier: Apache-2.0
"""The words of a horovodrun command -> its flags: those of the launcher, then those of the script.

`-np`, `-H` and the like are the long flags that they stand for. Variables that Horovod reads may
stand in front (`HOROVOD_CYCLE_TIME=3 horovodrun ...`); words that are neither are refused, for they
would be another command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from echelon.core.errors import ConfigError
from echelon.interop.parsing import command_words, flag_value, syntax_problem

LAUNCHERS = ("horovodrun", "mpirun")
SHORT: Mapping[str, str] = {
    "-np": "--num-proc",
    "-H": "--hosts",
    "-hostfile": "--hostfile",
    "-p": "--ssh-port",
    "-i": "--ssh-identity-file",
    "-prefix-timestamp": "--prefix-output-with-timestamp",
    "--min-num-proc": "--min-np",
    "--max-num-proc": "--max-np",
}
"""Other names of flags of the launcher."""
_ASSIGNMENT = re.compile(r"(HOROVOD_\w+)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"(.*/)?python[\d.]*")


def parse_horovod(path: Path, text: str) -> Mapping[str, object]:
    """Return the flags and variables of a command; ConfigError where it is none, or one is twice.

    A flag has its value, a list of values, or true.
    """
    words = command_words(path, text)
    script = next((n for n, word in enumerate(words) if word.endswith(".py")), len(words))
    found: dict[str, object] = {}
    for key, values in (*_launcher_flags(path, words[:script]), *_flags(path, words[script + 1 :])):
        if key in found:
            raise ConfigError(syntax_problem(path, f"has {key} twice"))
        found[key] = flag_value(values)
    if not found:
        raise ConfigError(syntax_problem(path, "holds no command with --flags"))
    return found


def _launcher_flags(path: Path, words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    start = next((n for n, word in enumerate(words) if word in LAUNCHERS), None)
    before = words if start is None else words[:start]
    rest = [] if start is None else [word for word in words[start + 1 :] if word != "-u"]
    for word in before:
        if match := _ASSIGNMENT.fullmatch(word):
            yield match[1], [match[2]]
        elif not _PYTHON.fullmatch(word) and word != "-u":
            raise ConfigError(syntax_problem(path, f"has {word!r}, where horovodrun is to stand"))
    yield from _flags(path, [word for word in rest if not _PYTHON.fullmatch(word)])


def _flags(path: Path, words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag and the words behind it."""
    flag, values = "", list[str]()
    for word in words:
        if word.startswith("-") and not _is_number(word) and len(word) > 1:
            if flag:
                yield flag, values
            name, equals, value = word.partition("=")
            long = name if not name.startswith("--") else f"--{name[2:].replace('_', '-')}"
            flag, values = SHORT.get(long, long), [value] if equals else []
        elif flag:
            values.append(word)
        else:
            raise ConfigError(syntax_problem(path, f"has {word!r} in front of every flag"))
    if flag:
        yield flag, values


def _is_number(word: str) -> bool:
    return isinstance(flag_value([word]), int | float)
