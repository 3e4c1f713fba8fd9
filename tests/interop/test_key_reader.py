"""What becomes of keys: set, not needed, refused, in conflict, unknown."""

from __future__ import annotations

from echelon.interop.abilities import KeyRule
from echelon.interop.key_reader import COUNT, KeyReader
from echelon.interop.ranks import ROLES, set_dtypes


def reader(**given: object) -> KeyReader:
    return KeyReader(tool="Tool", path="file", given=given)


def rules(found: KeyReader) -> list[str]:
    return [problem.rule for problem in found.problems]


def test_a_key_or_the_default_of_the_tool_sets() -> None:
    found = reader(a=3)
    found.set_or_default("a", "mesh.tp", 3, "said")
    found.set_or_default("b", "mesh.pp", 1, "not said")
    assert found.entries["mesh.tp"].source == "file: a"
    assert found.entries["mesh.pp"].source == "default of Tool"
    assert [(row.key, row.given) for row in found.rows] == [("a", "3"), ("b", "(not set)")]


def test_two_values_of_a_setting_are_a_conflict() -> None:
    found = reader(a=1, b=2)
    found.set("a", "mesh.tp", 1, "")
    found.set("b", "mesh.tp", 2, "")
    assert rules(found) == ["import-conflict"]
    assert found.problems[0].set_by == "file: a, file: b"


def test_values_are_held_to_their_kind() -> None:
    found = reader(whole=4.0, wrong="four", auto="auto")
    assert found.integer("whole", COUNT) == 4
    assert found.integer("wrong", COUNT) is None
    assert found.integer("auto", COUNT) is None
    assert rules(found) == ["wrong-type", "import-auto"]


def test_only_some_values_mean_what_is_done_here() -> None:
    found = reader(a=1, b=False)
    allowed = {"a": ((1,), "as here"), "b": ((True,), "always so"), "c": ((), "absent")}
    found.judge({key: KeyRule(only=only, why=why) for key, (only, why) in allowed.items()})
    assert rules(found) == ["import-not-honoured"]
    assert [row.key for row in found.rows] == ["a"]
    assert found.problems[0].suggestions == ("true", "no b")
    found.refuse("d", "it is needed", suggestions=map(str, (1, 2)))
    assert found.problems[1].suggestions == ("1", "2")
    assert found.problems[1].message == "d is not set: it is needed"


def test_keys_are_judged_by_their_rules_in_their_order() -> None:
    found = reader(**{"t.b": 1, "t.a": True, "t.c": "x", "t.d": "maybe"})
    found.judge(
        {
            "a": KeyRule(why="no need", takes="flag"),
            "d": KeyRule(why="no need", takes="flag"),
            "b": KeyRule(why="not here", refused=True),
            "c": KeyRule(why="whatever it is"),
            "e": KeyRule(why="not here", refused=True),
        },
        "t.",
    )
    assert [(row.key, row.why) for row in found.rows] == [
        ("t.a", "no need"),
        ("t.c", "whatever it is"),
    ]
    assert [(one.rule, one.key) for one in found.problems] == [
        ("wrong-type", "t.d"),
        ("import-not-honoured", "t.b"),
    ]


def test_what_nobody_asked_for_is_unknown() -> None:
    found = reader(stagee=1, empty=None)
    found.skip_all(("stage", "empty"), "not needed")
    found.finish()
    assert rules(found) == ["import-unknown-key"]
    assert found.problems[0].suggestions == ("stage",)
    assert [row.why for row in found.rows] == ["null is no value"]


def test_dtypes_of_all_roles() -> None:
    found = reader(half="bf16")
    set_dtypes(found, "half", "bf16", "fp32", "bf16", "fp32")
    values = [found.entries[f"precision.{role}"].value for role, _ in ROLES]
    assert values == ["bf16", "fp32", "bf16", "fp32"]
