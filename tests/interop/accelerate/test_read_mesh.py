"""Sequences that an Accelerate YAML cuts: gathered, around a ring, or heads for positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.core.plan import Context
from tests.interop.imports import Imports, rows_of

TABLE = "parallelism_config"


@pytest.fixture
def accelerate(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "accelerate")


def cut(**keys: object) -> str:
    """Return a configuration of eight processes with these keys of parallelism_config."""
    lines = "".join(f"\n  {TABLE}_{key}: {value}" for key, value in keys.items())
    head = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2"
    return f"{head}\n{TABLE}:{lines}"


def place(key: str) -> str:
    return f"{TABLE}.{TABLE}_{key}"


@pytest.mark.parametrize(
    ("text", "context"),
    [
        (cut(cp_size=4), Context(kind="gathered")),
        (cut(cp_size=4, cp_comm_strategy="allgather"), Context(kind="gathered")),
        (cut(cp_size=4, cp_comm_strategy="alltoall", sp_size=1), Context(kind="ring")),
        (cut(sp_size=4), Context(kind="ulysses", ulysses_degree=4)),
        (
            cut(cp_size=1, sp_size=4, cp_comm_strategy="alltoall"),
            Context(kind="ulysses", ulysses_degree=4),
        ),
    ],
)
def test_how_context_ranks_meet(accelerate: Imports, text: str, context: Context) -> None:
    layout = accelerate(text).job.plan.layout
    assert (layout.mesh.cp, layout.mesh.dp, layout.context) == (4, 2, context)


def test_a_sequence_that_is_not_cut_has_no_kind(accelerate: Imports) -> None:
    found = accelerate(cut(cp_size=1, cp_comm_strategy="alltoall", sp_size=1))
    assert (found.job.plan.mesh.cp, found.job.plan.layout.context) == (1, Context())
    (row,) = rows_of(found, place("cp_comm_strategy"))
    assert (row.setting, row.why) == ("", "a sequence is not cut")


def test_a_kind_that_the_file_does_not_say_is_the_default_of_accelerate(
    accelerate: Imports,
) -> None:
    (row,) = rows_of(accelerate(cut(cp_size=2)), place("cp_comm_strategy"))
    assert (row.setting, row.value, row.given) == ("context.kind", "gathered", "(not set)")


def test_what_engines_take_besides_needs_no_setting(accelerate: Imports) -> None:
    engines = {"cp_backend": "torch", "sp_backend": "deepspeed", "sp_attn_implementation": "sdpa"}
    lengths = {"sp_seq_length": 128, "sp_seq_length_is_variable": "true"}
    found = accelerate(cut(sp_size=2, **engines, **lengths))
    for key in (*engines, *lengths):
        (row,) = rows_of(found, place(key))
        assert row.setting == ""


@pytest.mark.parametrize(
    ("text", "rule", "key"),
    [
        (cut(cp_size=2, sp_size=2), "import-conflict", "sp_size"),
        (cut(cp_size=2, cp_comm_strategy="ring"), "unknown-choice", "cp_comm_strategy"),
        (cut(cp_size=2, cp_backend="deepspeed"), "import-not-honoured", "cp_backend"),
        (cut(sp_size=2, sp_backend="torch"), "import-not-honoured", "sp_backend"),
        (cut(sp_size=0), "out-of-range", "sp_size"),
        (cut(sp_sizes=2), "import-unknown-key", "sp_sizes"),
    ],
)
def test_what_cannot_be_is_refused(accelerate: Imports, text: str, rule: str, key: str) -> None:
    (problem,) = accelerate.problems(text)
    assert (problem.rule, problem.set_by.endswith(place(key))) == (rule, True)


def fsdp(version: int = 1, more: str = "", **keys: Any) -> str:
    """Return a configuration of four processes with these keys of fsdp_config."""
    table = "".join(f"\n  fsdp_{key}: {value}" for key, value in keys.items())
    return (
        f"distributed_type: FSDP\nnum_processes: 4\n{more}\n"
        f"fsdp_config:\n  fsdp_version: {version}{table}"
    )


def test_degrees_of_a_parallelism_config(accelerate: Imports) -> None:
    table = "parallelism_config"
    config = f"{{{table}_dp_replicate_size: 2, {table}_dp_shard_size: 2, {table}_tp_size: 1}}"
    more = f"{table}: {config}"
    plan = accelerate(fsdp(2, more)).job.plan
    assert (plan.mesh.dp_replicate, plan.mesh.dp_shard) == (2, 2)
    (problem,) = accelerate.problems(fsdp(2, more.replace("shard_size: 2", "shard_size: 3")))
    assert problem.rule == "import-conflict"
    assert problem.suggestions == ("num_processes = 6",)


def test_ranks_and_processes_must_agree(accelerate: Imports) -> None:
    (problem,) = accelerate.problems(fsdp(), ranks=8)
    assert problem.rule == "import-conflict"
    assert "num_processes = 4, but --ranks 8" in problem.message
    assert accelerate("distributed_type: FSDP", ranks=2).job.plan.mesh.dp_shard == 2
