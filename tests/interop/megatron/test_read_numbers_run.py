"""The course of a Megatron-LM run: what is redone, saved and read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.imports import Imports, rows_of
from tests.interop.megatron.commands import small


@pytest.fixture
def megatron(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "megatron")


def test_stages_recompute_and_the_course_of_a_run(megatron: Imports) -> None:
    more = (
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 "
        "--global-batch-size 16 --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 4 --log-interval 10 --save-interval 50 --eval-interval 25 "
        "--eval-iters 2 --seed 7 --overlap-grad-reduce --save out"
    )
    found = megatron(small(more))
    plan, job = found.job.plan, found.job
    assert plan.layout.pipeline.stages == ((0,), (1, 2, 3))
    assert (plan.layout.recompute.policy, plan.layout.recompute.every) == ("full", 1)
    assert plan.num_microbatches == 4
    assert (job.checkpoint.every, job.train.validate_every, job.observe.log_every) == (50, 25, 10)
    assert (job.train.validation_batches, plan.mathematics.seed) == (2, 7)
    assert rows_of(found, "--save")[0].setting == ""
    refused = megatron.refused(small(more.replace("num-layers 1", "num-layers 4")))
    assert refused == [("import-not-honoured", "--decoder-first-pipeline-num-layers")]


def test_data_of_the_command_has_no_effect_and_is_left_to_be_named(megatron: Imports) -> None:
    found = megatron(small("--data-path $1 --tokenizer-type Llama2Tokenizer --load c --save c"))
    assert rows_of(found, "--data-path")[0].fate == "without effect"
    assert any("--set data.source=PATH" in what for what in found.assumptions)
    assert rows_of(found, "--load")[0].fate == "without effect"
    assert megatron.refused(small("--load c")) == [("import-not-honoured", "--load")]


def test_data_that_the_flags_name_replaces_that_of_the_command(megatron: Imports) -> None:
    more = "--data-path tokens --tokenizer-type Llama2Tokenizer --tokenizer-model x.model"
    sets = ["data.source=stdlib", "data.tokenizer=bytes"]
    found = megatron(small(more), sets=sets)
    assert rows_of(found, "--data-path")[0].why == "data.source says what is read"
