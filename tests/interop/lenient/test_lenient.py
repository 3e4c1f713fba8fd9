"""A refused key is taken out, and the rest means what it would mean without it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from echelon.interop.key_reader import COUNT, KeyReader
from echelon.interop.lenient import Reading, read_leniently, unneeded_allowances


def read(given: Mapping[str, object], *allow: str) -> Reading:
    """Return what a small tool reads: `kind`, its `table.size`, and two counts that must agree."""

    def make(left: Mapping[str, object]) -> KeyReader:
        reader = KeyReader(tool="Tool", path="file", given=left)
        kind = reader.word("table.kind", ("a", "b"))
        reader.set_or_default("table.kind", "mesh.pp", 2 if kind == "b" else 1, "stages")
        if kind == "b":
            reader.skip("table.size", "of b")
        else:
            reader.only("table.size", (), "of b only")
        one, two = (reader.integer(key, COUNT) for key in ("one", "two"))
        if one and two and one != two:
            reader.conflict("one is not two", "mesh.tp", reader.where("one", "two"))
        elif one or two:
            reader.set("one" if one else "two", "mesh.tp", one or two, "pieces")
        reader.finish()
        return reader

    return read_leniently(make, given, allow)


def fates(found: Reading) -> dict[str, str]:
    """Return what became of each key."""
    return {row.key: row.fate for row in found.rows if row.given != "(not set)"}


def test_the_rest_is_read_as_if_the_file_had_no_such_key() -> None:
    found = read({"table.kind": "c", "one": 2, "misspelt": 1})
    assert found.entries["mesh.pp"].source == "default of Tool"
    assert found.entries["mesh.tp"].value == 2
    assert [problem.rule for problem in found.refused] == ["unknown-choice", "import-unknown-key"]
    assert fates(found) == {"table.kind": "refused", "one": "taken", "misspelt": "refused"}


@pytest.mark.parametrize("allow", [("misspelt", "table.kind"), ("all",), ("--misspelt", "all")])
def test_what_is_allowed_is_dropped_and_the_settings_are_the_same(allow: tuple[str, ...]) -> None:
    given = {"table.kind": "c", "one": 2, "misspelt": 1}
    found = read(given, *allow)
    assert found.refused == ()
    assert found.entries == read(given).entries
    assert fates(found)["misspelt"] == "dropped"


def test_a_key_of_a_conflict_that_is_allowed_leaves_the_other() -> None:
    assert "mesh.tp" not in read({"one": 1, "two": 2}).entries
    found = read({"one": 1, "two": 2}, "one")
    assert (found.entries["mesh.tp"].value, found.refused) == (2, ())
    assert fates(found) == {"one": "dropped", "two": "taken"}


def test_what_follows_from_a_refused_key_is_not_refused_again() -> None:
    found = read({"table.kind": "c", "table.size": 4})
    assert {problem.rule for problem in found.refused} == {"unknown-choice", "import-not-honoured"}
    found = read({"table.other": 1, "table.kind": "b", "table.size": 4})
    assert fates(found)["table.size"] == "without effect"


def test_an_allowance_that_is_not_needed_is_told() -> None:
    rows = read({"table.kind": "c", "one": 2}).rows
    (problem,) = unneeded_allowances(("table.kin", "table.kind", "all"), rows, "file")
    assert (problem.rule, problem.suggestions) == ("import-allow", ("--allow table.kind",))
    (problem,) = unneeded_allowances(("one",), rows, "file")
    assert problem.rule == "import-allow"
