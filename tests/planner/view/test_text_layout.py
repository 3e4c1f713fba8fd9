"""Tables are narrowed, then folded; sentences go on under their text."""

from __future__ import annotations

from echelon.planner.view.text_layout import fit_page, table


def test_a_table_is_narrowed_then_folded() -> None:
    assert table(("a", "b"), [("x", 1), ("longer", 22)]) == "a        b\nx        1\nlonger  22"
    heads = ("what", "two words", "why")
    assert table(heads, [("x", 1, "some text that goes on")], 28).splitlines() == [
        "        two",
        "what  words  why",
        "x         1  some text that",
        "             goes on",
    ]
    keys = table(("key", "why"), [("optimizer.params.weight_decay", "as it is")], 18)
    assert keys.splitlines()[1:] == [
        "optimizer.     as",
        "params.        it",
        "weight_decay   is",
    ]
    numbers = [("x", *range(1000, 1012))]
    folded = table(("what", *map(str, range(12))), numbers, 40).split("\n\n")
    assert [part.splitlines()[0].split()[0] for part in folded] == ["what", "what"]
    assert max(len(line) for part in folded for line in part.splitlines()) <= 40
    assert [word for part in folded for word in part.splitlines()[1].split()[1:]] == [
        str(number) for number in range(1000, 1012)
    ]


def test_a_line_that_is_too_long_goes_on_under_its_text() -> None:
    first, second = fit_page("zero     " + "word " * 20).rstrip().splitlines()
    assert first.startswith("zero     word")
    assert second.startswith("         word")
    assert fit_page("short\n\n  kept  as it is") == "short\n\n  kept  as it is"
