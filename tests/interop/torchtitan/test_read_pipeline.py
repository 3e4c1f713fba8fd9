"""The pipeline of a torchtitan configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.imports import Imports
from tests.interop.torchtitan.configs import small


@pytest.fixture
def titan(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "torchtitan")


def test_a_pipeline_lists_its_stages_by_modules(titan: Imports) -> None:
    more = (
        'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"\n'
        'module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1"], ["layers.2"], '
        '["layers.3", "norm", "output"]]'
    )
    found = titan(
        small("global_batch_size = 8", parallel=more).replace("= 2\n", "= 4\n", 1), extends="nano"
    )
    pipeline = found.job.plan.layout.pipeline
    assert (pipeline.schedule, pipeline.virtual_stages) == ("interleaved-1f1b", 2)
    assert pipeline.stages == ((0,), (1,), (2,), (3,))
    assert (found.job.plan.num_microbatches, found.job.plan.layout.microbatch_sequences) == (4, 1)


def test_stages_follow_from_the_layers_where_the_ends_count_too(titan: Imports) -> None:
    more = "pipeline_parallel_degree = 2"
    found = titan(small(parallel=more), extends="nano")
    assert found.job.plan.layout.pipeline.stages == ((0, 1), (2, 3))
    more += "\npipeline_parallel_last_stage_less_layers = 3"
    assert titan(small(parallel=more), extends="nano").job.plan.layout.pipeline.stages == (
        (0, 1, 2),
        (3,),
    )
