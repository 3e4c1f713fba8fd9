"""A job and a run to observe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from echelon.config.job import Job
from echelon.config.load import load_job
from echelon.observe.run_directory import RunDirectory, create_run
from echelon.train.observer import StepFacts


def make_job(*, steps: int = 10, log_every: int = 1, events: bool = True) -> Job:
    """Return the job of the smallest preset, with `steps` steps."""
    job = load_job("nano")
    return replace(
        job,
        train=replace(job.train, steps=steps),
        observe=replace(job.observe, log_every=log_every, events=events),
    )


def make_run(runs_dir: Path, name: str = "nano", *, name_was_given: bool = True) -> RunDirectory:
    """Make a run directory."""
    return create_run(
        runs_dir,
        name,
        name_was_given=name_was_given,
        plan=make_job().plan,
        run_toml='extends = "nano"\n',
        environment={"host": "here"},
    )


def facts(step: int, loss: float = 2.5) -> StepFacts:
    """Return what training says about one step of a dense model."""
    return StepFacts(
        routing=None,
        loads={},
        loss_scale=1.0,
        skipped=False,
        step=step,
        loss=loss,
        grad_norm=0.5,
        learning_rate=3e-4,
        tokens=1000,
        step_s=0.5,
        rank_waits_s=(0.125, 0.0),
        rank_used_bytes=(2**30, 2**31),
    )
