"""The words of a shell script, cut apart and filled in."""

from __future__ import annotations

import pytest

from echelon.interop.commands.shell_words import Variables, split_tokens


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
