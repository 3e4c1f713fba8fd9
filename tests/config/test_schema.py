"""The tables of run.toml are those that are promised, each with its keys."""

from __future__ import annotations

from echelon.config.schema import tables


def test_the_tables_of_a_run_file_are_those_that_are_promised() -> None:
    promised = "model lora cluster mesh zero pipeline batch precision recompute context experts"
    promised += " kernels collectives servers local_sgd optimizer data train checkpoint"
    promised += " observe"
    assert {table for table in tables() if "." not in table} == set(promised.split())
