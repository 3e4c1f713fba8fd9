# SPDX-License-Identifier: Apache-2.0
"""`echelon data look`: data of a run, or of a folder of prepared data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echelon.api.generating import data_of_run
from echelon.core.errors import ConfigError
from echelon.core.rulebook.data import SAMPLE_OF_STEP
from echelon.training.data.batches import BatchLayout
from echelon.training.data.look import SampleLook, SourceLook, look_at_sample, look_at_sources
from echelon.training.data.mixed_dataset import open_data


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLook:
    """Sources of some data, and a sample of a step if one was asked for."""

    path: str
    hash: str
    sources: tuple[SourceLook, ...]
    sample: SampleLook | None = None


def look_at(path: str | Path, *, step: int | None = None, sample: int = 0) -> DataLook:
    """Look at the data of a run, or at a folder of prepared data.

    `step` (from 1) and `sample` (from 0) ask for the text of a sample of a run. DataError if
    the data is missing or damaged; ConfigError if there is no such sample.
    """
    from echelon.config.load import load_job
    from echelon.telemetry.run_directory import run_of

    folder = Path(path)
    if not (folder / "plan.json").is_file() and folder.parent.name != "checkpoints":
        if step is not None:
            raise ConfigError(
                SAMPLE_OF_STEP.problem(
                    f"{folder} is no run, so it has no step {step}",
                    suggestions=("echelon data look RUN --step 1", f"echelon data look {folder}"),
                )
            )
        data = open_data(folder, verify=True)
        return DataLook(path=str(folder), hash=data.index.hash, sources=look_at_sources(data))
    if sample and step is None:
        raise ConfigError(
            SAMPLE_OF_STEP.problem(
                f"sample {sample} is of a step, and no step is named",
                suggestions=(f"--step 1 --sample {max(sample, 0)}", "without --sample"),
            )
        )
    run = run_of(folder)
    job, layout = load_job(run.run_file), BatchLayout.from_plan(run.plan())
    dataset = open_data(data_of_run(run.run_file), train_on=job.data.train_on)
    training = dataset
    if job.data.validation_fraction > 0:
        training, _ = dataset.split(job.data.validation_fraction)
    shown = None
    if step is not None:
        shown = look_at_sample(
            training,
            layout,
            seed=run.plan().mathematics.seed,
            step=step,
            sample=sample,
            epoch_end=job.data.epoch_end,
        )
    return DataLook(
        path=str(folder),
        hash=dataset.index.hash,
        sources=look_at_sources(training, steps=job.train.steps, layout=layout),
        sample=shown,
    )
