"""The tables of run.toml are those that are promised, each with its keys."""

from __future__ import annotations

import inspect
from types import NoneType
from typing import get_args, get_origin

from echelon.config import schema
from echelon.config.schema import SETTINGS, tables
from echelon.core.settings.configured import configured_fields, value_of_field, value_of_setting


def test_the_tables_of_a_run_file_are_those_that_are_promised() -> None:
    promised = "model lora cluster mesh zero pipeline batch precision recompute context experts"
    promised += " kernels collectives servers local_sgd optimizer data train checkpoint"
    promised += " observe"
    assert {table for table in tables() if "." not in table} == set(promised.split())


def test_a_word_and_the_none_that_stands_for_it_are_inverse() -> None:
    """A field that may be None, or a tuple, has one word for it; defaults go there and back."""
    classes = [kind for _, kind in inspect.getmembers(schema, inspect.isclass)]
    records = [kind for kind in classes if kind.__module__.startswith("echelon.core.")]
    seen = 0
    for record in records:
        for _, name, hint in configured_fields(record):
            optional = NoneType in get_args(hint) or get_origin(hint) is tuple
            for key in (key for key in SETTINGS if key.rpartition(".")[2] == name and optional):
                if key == "pipeline.stages":
                    continue  # A plan always has stages: config/plan_view.py writes their blocks.
                setting, seen = SETTINGS[key], seen + 1
                words = getattr(setting.kind, "words", ())
                assert len(words) <= 1, key
                for given in (*words, setting.default):
                    if given is not None:
                        field = value_of_field(hint, given)
                        assert value_of_setting(setting, field) == given, key
    assert seen >= 10
