"""Optimizers: what each reads is a field of the settings, and tools have their own names."""

from __future__ import annotations

from dataclasses import fields

from echelon.core.choices.optimizers import OPTIMIZERS, PLAIN_OPTIMIZER
from echelon.core.plan import Optimizer


def test_what_an_optimizer_reads_is_a_setting() -> None:
    names = {field.name for field in fields(Optimizer)}
    assert PLAIN_OPTIMIZER in OPTIMIZERS
    for record in OPTIMIZERS.values():
        assert set(record.settings) <= names
        assert record.others is None or record.others in OPTIMIZERS
        # One that takes whole matrices leaves all that is none to another.
        assert record.needs_whole_matrices is (record.others is not None)


def test_a_tool_has_its_own_names() -> None:
    assert OPTIMIZERS.of_tool("megatron") == {"adam": "adamw", "sgd": "sgd", "muon": "muon"}
    assert OPTIMIZERS.of_tool("torchtitan") == {"AdamW": "adamw"}
    assert OPTIMIZERS.of_tool("none") == {}
