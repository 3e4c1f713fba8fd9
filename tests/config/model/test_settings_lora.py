"""The table of adapters, read."""

from __future__ import annotations

from echelon.config.entries import Entry
from echelon.config.model.settings import has_lora, lora_targets, read_lora
from echelon.config.view import View


def view(**values: object) -> View:
    found = {f"lora.{key}": value for key, value in values.items()}
    return View(entries={key: Entry(value=value, source="") for key, value in found.items()})


def test_without_a_rank_all_weights_are_trained() -> None:
    assert not has_lora(view())
    assert read_lora(view()) is None


def test_targets_come_in_the_order_of_a_forward_pass() -> None:
    found = read_lora(view(rank=2, targets=["down", "k"], alpha=3))
    assert found is not None
    assert (found.targets, found.alpha) == (("k", "down"), 3.0)
    assert lora_targets(view(rank=2)) == ("q", "k", "v", "o", "gate", "up", "down")
