"""What does not go together in a block is refused, with what would do."""

from __future__ import annotations

import pytest

from tests.config.problems import problems_of

REFUSED = {
    "turns-need-rotary": ("gpt2", ["model.rotary.fraction=0.5"]),
    "heads-turn": ("llama3-8b", ["model.rotary.fraction=0.01"]),
    "block-forms-compose": ("mixtral-8x7b", ["model.residual=parallel"]),
    "factor-without-dropout": (
        "llama3-8b",
        ["model.dropout=0.1", "model.multipliers.residual=0.22"],
    ),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_it_is_refused(rule: str) -> None:
    preset, sets = REFUSED[rule]
    assert list(problems_of(preset, sets)) == [rule]


def test_latent_attention_has_turns_of_its_own() -> None:
    assert "turns-need-rotary" in problems_of("deepseek-v3", ["model.rotary.none_every=4"])


def test_what_families_have_is_taken() -> None:
    sets = [
        "model.rotary.fraction=0.5",
        "model.attention_scale=0.1",
        "model.multipliers.logits=0.1",
    ]
    assert problems_of("llama3-8b", [*sets, "model.activation=gelu"]) == {}
