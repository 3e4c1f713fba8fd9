"""Words of other tools stand for words that are known here, and near words for slips of them."""

from __future__ import annotations

from typing import get_args

import pytest

from echelon.cli.app import COMMANDS
from echelon.config.schema import SETTINGS
from echelon.core.messages.names import SYNONYMS
from echelon.core.rules import did_you_mean
from echelon.core.settings.list_types import ChoiceList
from echelon.core.settings.value_types import Choice
from echelon.planner.search.request import Objective
from echelon.schedule.build import SCHEDULES


def known_words() -> set[str]:
    """Return every word that a synonym may stand for."""
    words = {key.rpartition(".")[2] for key in SETTINGS} | {*COMMANDS, *SCHEDULES, "--help"}
    words |= {*get_args(Objective), "front", "hf"}
    for setting in SETTINGS.values():
        kind = setting.kind
        if isinstance(kind, Choice):
            words |= set(kind.options)
        elif not isinstance(kind, ChoiceList):
            words |= set(getattr(kind, "words", ()))
    return words


def test_every_synonym_stands_for_a_word_that_is_known() -> None:
    unknown = {ours for meant in SYNONYMS.values() for ours in meant} - known_words()
    assert unknown == set()
    assert all(word == word.lower() for word in SYNONYMS)


@pytest.mark.parametrize(
    ("typed", "known", "meant"),
    [
        ("path", ["source", "epoch_end", "mixture"], ("source",)),
        ("speed", ["time", "throughput", "cost", "devices", "expected"], ("throughput", "time")),
        ("TPP", ["pp", "tp"], ("tp", "pp")),
        ("MESH", ["mesh", "model"], ("mesh",)),
        ("explian", ["explain", "export"], ("explain",)),
        ("warmup", ["warmup_steps", "weight_decay"], ("warmup_steps",)),
        ("global-sequences", ["global_sequences"], ("global_sequences",)),
    ],
)
def test_what_is_meant_comes_first(typed: str, known: list[str], meant: tuple[str, ...]) -> None:
    assert did_you_mean(typed, known) == meant


@pytest.mark.parametrize(
    ("typed", "known"),
    [
        ("path", ["epoch_end", "mixture", "batch"]),
        ("speed", ["expected", "devices"]),
        ("gpt5", ["gpt2", "gpt2-xl"]),
        ("tp", ["pp", "cp", "ep"]),
        ("dataset", ["state", "test"]),
    ],
)
def test_another_subject_is_never_proposed(typed: str, known: list[str]) -> None:
    assert did_you_mean(typed, [one for one in known if one != typed]) == ()
