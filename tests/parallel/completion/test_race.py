"""A race is told with its place in the code, and crosses to the prover as a line of a file."""

from __future__ import annotations

from echelon.parallel.completion.race import Race, RaceKind, place_in_code


def test_a_race_is_a_line_of_a_file() -> None:
    race = Race(
        kind=RaceKind.USED,
        operation="all_reduce x",
        axis="dp",
        step=1,
        rank=0,
        at=place_in_code(),
        says="its result is used by mm",
        when_s=2.5,
    )
    assert Race.from_json(race.to_json()) == race
    assert "test_race.py" in race.at
