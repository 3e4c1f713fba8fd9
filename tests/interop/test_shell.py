"""Variables, arrays and branches of a shell script are filled in, and nothing is run."""

from __future__ import annotations

import pytest

from echelon.interop.shell import Variables, script_commands, split_tokens


def last(text: str) -> list[str]:
    """Return the words of the last command of a script."""
    return script_commands(text)[-1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=4\nrun $A ${A} x$A", ["run", "4", "4", "x4"]),
        ("run ${A:-8} ${1:-x} $2 ${HOME}", ["run", "8", "x", "$2", "${HOME}"]),
        ("N=2\nG=8\nW=$(($N*G + 1))\nrun $W", ["run", "17"]),
        (
            "A=(--x 1 # a note\n  --y 'two words'\n)\nrun ${A[@]}",
            ["run", "--x", "1", "--y", "two", "words"],
        ),
        ('A=(--y "two words")\nrun "${A[@]}"', ["run", "--y", "two words"]),
        ("A=(1)\nA+=(2 3)\nrun ${A[@]}", ["run", "1", "2", "3"]),
        ('A="--x 1"\nA="$A --y"\nrun $A', ["run", "--x", "1", "--y"]),
        ("A=a\nif [ $A = a ]; then B=1; else B=2; fi\nrun $B", ["run", "1"]),
        ('if [[ "$A" == x ]] || [[ -z "$B" ]]; then B=1; else B=2; fi\nrun $B', ["run", "1"]),
        ('if [ -n "${KEY}" ]; then B=1; elif [ 2 -gt 1 ]; then B=3; fi\nrun $B', ["run", "3"]),
        ("if [ ! -f x ]; then B=1; fi\nrun ${B:-0}", ["run", "0"]),
        ("while [ $# -gt 0 ]; do\n case $1 in --x) A=2;; esac\ndone\nrun ${A:-1}", ["run", "1"]),
        ("run a 2>&1 | tee log", ["tee", "log"]),
        ("C='run --x 1'\neval $C", ["run", "--x", "1"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert last(text) == words


def test_comments_and_lines_that_go_on() -> None:
    text = "run \\\n  --x 1 \\  # a note, with a ' in it\n  # a line of it\n  --y 2\n"
    assert last(text) == ["run", "--x", "1", "--y", "2"]
    assert last("run --x 1\n  --y 2\n") == ["run", "--x", "1", "--y", "2"]
    assert script_commands("A=1 run x\n# nothing") == [["A=1", "run", "x"]]


def test_a_quotation_that_does_not_end_is_told() -> None:
    with pytest.raises(ValueError, match="does not end"):
        script_commands("run 'a")


def test_words_keep_quotations_and_operators_are_apart() -> None:
    found = split_tokens("a 'b c'|d \"$(x y)\" ${E:-f g}>out; h")
    assert [token.text for token in found] == [
        "a",
        "'b c'",
        "|",
        "d",
        '"$(x y)"',
        "${E:-f g}",
        ">",
        "out",
        ";",
        "h",
    ]
    assert [token.text for token in found if token.operator] == ["|", ">", ";"]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("$A", ["1"]),
        ('"$A b"', ["1 b"]),
        ("$L", ["x", "y"]),
        ('"${L[@]}"', ["x", "y"]),
        ("${N:-2}${N-3}", ["23"]),
        ("${A:+yes}${N:+no}", ["yes"]),
        ("$((A * 8 - 2 % 3))", ["6"]),
        ("$((N * 8))", ["$((N * 8))"]),
        ("'$A'\\$A", ["$A$A"]),
        ('"it\'s"', ["it's"]),
        ('""', [""]),
        ("$N", ["$N"]),
    ],
)
def test_variables_are_filled(raw: str, words: list[str]) -> None:
    variables = Variables()
    variables.set_word("A", "1", False)
    variables.set_array("L", ["x"], False)
    variables.set_array("L", ["y"], True)
    assert variables.fill(raw) == words
    if raw == "$N":
        assert variables.fill(raw, unset="") == []
