"""What is told of islands that were lost: rounds, rows, and whether they came back."""

from __future__ import annotations

from echelon.core.choices.local_sgd import IslandChange
from echelon.training.local_sgd.elastic_steps import absent_islands, news_of


def change(island: int, step: int, *, there: bool, attempt: int = 0) -> IslandChange:
    cause = "" if there else "killed"
    return IslandChange(island=island, attempt=attempt, step=step, there=there, cause=cause)


def test_rounds_and_rows_of_one_that_came_back_and_one_that_did_not() -> None:
    changes = [
        change(1, 8, there=False),
        change(1, 16, there=True, attempt=1),
        change(0, 20, there=False),
    ]
    back, gone = absent_islands(changes, 24, every=4, share=3)

    assert (back.first_step, back.last_step, back.num_sequences) == (9, 16, 24)
    assert (back.first_round, back.last_round, back.returned) == (3, 4, True)
    assert "it missed rounds 3 to 4: its 24 sequences of steps 9 to 16 (rows 3 to 5" in back.says()
    assert (gone.first_row, gone.last_row, gone.last_step, gone.returned) == (0, 2, 24, False)
    assert "not back; it missed round 6" in gone.says()


def test_one_that_is_back_before_a_round_is_over_missed_none() -> None:
    (one,) = absent_islands(
        [change(2, 8, there=False), change(2, 8, there=True, attempt=1)], 8, every=4, share=1
    )
    assert one.says() == "island 2: killed; back with step 9, no round missed"


def test_changes_are_told_in_words() -> None:
    lost, back = news_of([change(1, 8, there=False), change(1, 16, there=True)])
    assert lost.startswith("island 1 is lost: what it did after step 8 counts nowhere: killed")
    assert back == "island 1 is back, and begins with step 17"
