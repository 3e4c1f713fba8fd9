"""What the bench of the explorer tells of its times; the times are a browser's."""

from __future__ import annotations

from bench.explorer import RUNS, Change, ModelTimes, misses, report, roomy


def times(paint: float, change: float) -> ModelTimes:
    found = ModelTimes(model="nano", cluster="laptop", file_bytes=400_000)
    found.paints, found.verdicts, found.settled = [paint] * 3, [paint + 20] * 3, [change + 60] * 4
    found.held = [change]
    found.changes = [Change(control="pp", ms=change, plan=plan) for plan in (True, False)] * 2
    return found


def test_targets_that_are_missed_are_named() -> None:
    assert misses([times(299.0, 49.0)], 500_000) == []
    assert misses([times(301.0, 51.0)], 500_001) == [
        "nano: first paint after 301 ms",
        "nano: a change takes 51 ms",
        "the page has 500,001 bytes without data",
    ]


def test_changes_to_a_plan_and_to_a_broken_rule_are_told_apart() -> None:
    lines = list(report([times(100.0, 12.5)]))
    assert (
        "| nano | laptop | 400 | 100 | 120 | 12.5 (12.5) | 12.5 (12.5) | 12.5 (12.5) | 72 |"
        in lines
    )
    assert "| pp | 12.5 | 2 | 12.5 | 2 |" in lines


def test_the_largest_model_is_measured_on_16384_devices_with_room_to_move() -> None:
    assert ("llama3.1-405b", "16384xh100") in RUNS
    state = roomy({"dp_shard": 2048, "sequences": 2048, "zero": 3, "sequence_parallel": True})
    assert state == {
        "dp_shard": "256",
        "sequences": "2048",
        "zero": "3",
        "sequence_parallel": "true",
    }
    assert roomy({"dp_shard": 1, "sequences": 4, "zero": 0})["zero"] == "0"
