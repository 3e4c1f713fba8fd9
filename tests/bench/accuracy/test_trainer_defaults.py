"""Settings that a row names override its trainer's; the table of defaults has sources."""

from __future__ import annotations

import pytest

from bench.accuracy.published.programs import Program, software_of
from bench.accuracy.published.rows import Refused, Row
from bench.accuracy.published.trainer_defaults import DTYPE_BYTES, trainer_defaults
from echelon.cost.inputs.cost_inputs import TrainerConstants
from echelon.cost.seconds.trainers import FRAMEWORKS


def software(**cells: str) -> TrainerConstants:
    """Return the constants of a row of Megatron-Core in bf16 with these cells."""
    program = Program(generation="megatron-core-2025", zero=1.0, fused=True)
    return software_of(Row(id="r", cells={"precision": "bf16", **cells}), program)


def test_a_row_that_names_nothing_has_its_generations_constants() -> None:
    usual = FRAMEWORKS["megatron-core-2025"]
    assert software() == software(gradient_dtype="", loss="?")
    assert software().gradient_bytes == usual.gradient_bytes
    assert software().logit_held == usual.logit_held


def test_a_row_overrides_its_trainer() -> None:
    named = software(gradient_dtype="fp32", reduction_dtype="bf16", loss="in-place")
    assert (named.gradient_bytes, named.reduced_bytes) == (4.0, 2.0)
    assert named.logit_held == 4.0


def test_what_a_row_leaves_blank_its_trainer_tells() -> None:
    plain = software(framework="Megatron-LM", precision="bf16")
    assert (plain.gradient_bytes, plain.reduced_bytes, plain.logit_held) == (4.0, 4.0, 6.0)
    recipe = software(framework="NeMo / Megatron-Bridge", precision="bf16")
    assert (recipe.gradient_bytes, recipe.reduced_bytes, recipe.logit_held) == (2.0, 2.0, 2.0)
    half = software(framework="Megatron-LM", precision="fp16")
    assert (half.gradient_bytes, half.reduced_bytes) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("column", "word"),
    [("gradient_dtype", "int3"), ("reduction_dtype", "8"), ("loss", "chunked 0")],
)
def test_a_wrong_word_refuses_the_row(column: str, word: str) -> None:
    with pytest.raises(Refused, match=column):
        software(**{column: word})


def test_every_default_is_of_a_known_trainer_and_has_a_source() -> None:
    table = trainer_defaults()
    assert table["megatron-lm-bf16"].reduction_dtype == "fp32"
    assert table["megatron-bridge-performance"].reduction_dtype == "bf16"
    for one in table.values():
        assert set(one.trainers) <= set(FRAMEWORKS)
        assert ".py" in one.source
        assert {one.gradient_dtype, one.reduction_dtype} <= {"", "parameters", *DTYPE_BYTES}
