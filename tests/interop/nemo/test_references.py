"""References of a YAML of NeMo are what they stand for, where the file has it."""

from __future__ import annotations

from echelon.interop.nemo.references import fill_references


def test_references_are_filled_and_sums_made() -> None:
    given: dict[str, object] = {
        "model.hidden_size": 64,
        "model.ffn": "${multiply:4, ${.hidden_size}}",
        "model.seq": "${training.model.length}",
        "model.length": 128,
        "run.name": "gpt_${model.hidden_size}",
        "run.dir": "${base_dir}/x",
        "run.bad": "${multiply:a, 2}",
        "run.loop": "${run.loop}",
    }
    found = fill_references(given)
    assert (found["model.ffn"], found["model.seq"], found["run.name"]) == (256, 128, "gpt_64")
    assert (found["run.dir"], found["run.bad"]) == ("${base_dir}/x", "${multiply:a, 2}")
    assert found["run.loop"] == "${run.loop}"
