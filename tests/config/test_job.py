"""A job survives JSON, has the hash of its content, and counts steps that are done."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from echelon.config.job import Job
from echelon.config.load import load_job
from tests.config.problems import write


def test_a_job_survives_json() -> None:
    job = load_job("nano", ["mesh.tp=2", "mesh.pp=2", "checkpoint.keep=all"])
    assert Job.from_json(job.to_json()) == job
    assert Job.from_ranks(job.for_ranks()) == job
    assert Job.from_json(job.to_json()).content_hash() == job.content_hash()


def test_the_hash_is_of_the_content_and_not_of_where_it_was_set(tmp_path: Path) -> None:
    run = write(tmp_path, 'extends = "nano"\n[train]\nsteps = 50\n', "nano.toml")
    here, there = load_job(run), load_job("nano", ["train.steps=50"])
    assert here.sources != there.sources
    assert here.content_hash() == there.content_hash()
    other = dataclasses.replace(here, train=dataclasses.replace(here.train, steps=51))
    assert other.content_hash() != here.content_hash()
    assert load_job(run, ["mesh.tp=2"]).content_hash() != here.content_hash()


def test_intervals_count_steps_that_are_done() -> None:
    sets = ["train.steps=35", "train.validate_every=10", "checkpoint.every=never"]
    job = load_job("nano", sets)
    assert [n for n in range(1, 36) if job.train.validates_after(n)] == [10, 20, 30, 35]
    assert not any(job.checkpoint.saves_after(n) for n in range(1, 36))
    job = load_job("nano", ["train.validate_every=never", "checkpoint.every=3"])
    assert [n for n in range(1, 10) if job.checkpoint.saves_after(n)] == [3, 6, 9]
    assert not any(job.train.validates_after(n) for n in range(1, job.train.steps + 1))
