"""What became of a run: the last take of each step counts, and what there is not is None."""

from __future__ import annotations

import json
from pathlib import Path

from echelon.telemetry.summary import summarize_run
from tests.telemetry.runs import make_run


def step(number: int, loss: float, seconds: float, **more: object) -> dict[str, object]:
    return {
        "kind": "step",
        "step": number,
        "loss": loss,
        "tokens": 100,
        "step_s": seconds,
        "peak_bytes": 10 * number,
        **more,
    }


def test_a_run_that_did_nothing_has_no_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    found = summarize_run(run.path)
    assert (found.name, found.starts, found.steps, found.tokens) == ("nano", 0, 0, 0)
    assert found.plan_hash == run.plan().content_hash()
    assert found.total_steps == run.plan().mathematics.optimizer.total_steps
    assert {found.first_loss, found.best_validation, found.step_s, found.tokens_per_s} == {None}
    assert (found.peak_bytes, found.dropped_share, found.checkpoints) == (None, None, ())


def test_steps_taken_again_count_once_as_they_were_taken_last(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    routed = {"imbalance": 1.5, "assignments": 50, "dropped": 10}
    lines = [
        {"kind": "start", "step": 0, "steps": 9},
        step(1, 4.0, 1.0, **routed),
        step(2, 9.0, 9.0),
        {"kind": "validation", "step": 2, "loss": 3.5},
        {"kind": "start", "step": 1, "steps": 10},
        step(2, 3.0, 0.5, **(routed | {"imbalance": 1.25, "dropped": 0})),
        step(3, 2.0, 0.25),
        {"kind": "validation", "step": 2, "loss": 3.0},
        {"kind": "validation", "step": 3, "loss": 3.25},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.path / "metrics.jsonl").write_text(text)
    found = summarize_run(run.path)
    assert (found.starts, found.steps, found.total_steps, found.tokens) == (2, 3, 10, 300)
    assert (found.first_loss, found.last_loss) == (4.0, 2.0)
    assert (found.first_validation, found.last_validation, found.best_validation) == (
        3.0,
        3.25,
        3.0,
    )
    assert found.num_validations == 2
    # Medians over steps: 0.25, 0.5 and 1 s of 100 tokens each.
    assert (found.step_s, found.tokens_per_s, found.peak_bytes) == (0.5, 200.0, 30)
    assert (found.first_imbalance, found.last_imbalance) == (1.5, 1.25)
    assert found.dropped_share == 0.1
