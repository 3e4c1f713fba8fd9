"""What nobody says of a run is assumed, and told."""

from __future__ import annotations

from echelon.planner.search.request import make_request


def test_what_nobody_says_is_assumed_and_told() -> None:
    request = make_request("llama2-7b", cluster="8xv100-32gb")
    numbers = request.mathematics
    assert numbers.precision.parameters == "fp16"
    assert numbers.precision.loss_scaling == "dynamic"
    assert any("fp16" in text for text in request.defaults_taken)
    own = make_request("nano", cluster="8xh100", settings=["precision.parameters=bf16"])
    assert own.defaults_taken == ()
    assert (own.mathematics.global_sequences, own.mathematics.sequence_length) == (16, 128)
