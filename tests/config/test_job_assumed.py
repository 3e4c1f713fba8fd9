"""What nobody said of a run is told: the batch of a preset, and dtypes that follow devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.job import assumed_of_job
from echelon.config.load import load_job
from echelon.planner.search.request import make_request

H100, V100, CPU = "cluster.preset=8xh100", "cluster.preset=8xv100-32gb", "cluster.preset=8xcpu"


@pytest.mark.parametrize(
    ("cluster", "dtype", "scaling", "text"),
    [
        (H100, "bf16", "none", "parameters in bf16, the rest in fp32"),
        (V100, "fp16", "dynamic", "parameters in fp16 (V100"),
        (CPU, "fp32", "none", ""),
    ],
)
def test_dtypes_follow_the_devices_in_a_run_and_in_a_search(
    cluster: str, dtype: str, scaling: str, text: str
) -> None:
    job = load_job("llama2-7b", (cluster,))
    precision = job.plan.mathematics.precision
    assert (precision.parameters, precision.loss_scaling) == (dtype, scaling)
    assert (precision.gradients, precision.reduction, precision.master) == ("fp32",) * 3
    request = make_request("llama2-7b", cluster=cluster.partition("=")[2])
    assert request.mathematics.precision == precision
    batch, *dtypes = assumed_of_job(job)
    assert batch == "the batch (of preset llama2-7b)"
    assert dtypes == ([one for one in request.defaults_taken if text in one][-1:] if text else [])
    assert batch in request.defaults_taken


def test_what_somebody_said_is_not_assumed(tmp_path: Path) -> None:
    batch = ("batch.global_sequences=64", "batch.sequence_length=128")
    job = load_job("llama3-8b", (H100, "precision.master=fp32", *batch))
    assert job.plan.mathematics.precision.parameters == "fp32"
    assert assumed_of_job(job) == ()
    assert assumed_of_job(load_job("nano", ())) == ()
    run = tmp_path / "run.toml"
    run.write_text('extends = "llama3-8b"\n[batch]\nglobal_sequences = 64\n')
    assert assumed_of_job(load_job(run, ())) == ("the sequence length (of preset llama3-8b)",)


def test_parameter_servers_need_no_loss_scale() -> None:
    sets = (V100, "servers.count=1", "mesh.dp_replicate=7", "batch.global_sequences=14")
    assert load_job("nano", sets).plan.mathematics.precision.parameters == "fp32"
