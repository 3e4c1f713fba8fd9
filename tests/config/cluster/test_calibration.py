"""The [calibration] table is written into a cluster file and read again; bands read it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from echelon.config.cluster.file import CalibrationRecord, cluster_toml, read_calibration
from echelon.config.cluster.settings import named_cluster, read_cluster_file
from echelon.core.cluster import STEP_ERROR, Cluster

RECORD = CalibrationRecord(
    date="2026-11-23",
    torch="2.13.0",
    echelon="0.1.0",
    nodes=2,
    ranks_per_node=4,
    merged=3,
    held_out=(("products", 0.0625), ("network", 0.25)),
)


def _cluster() -> Cluster:
    cluster = named_cluster("8xcpu-core", "a test")
    assert isinstance(cluster, Cluster)
    return cluster


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_toml(_cluster(), ("Measured.",), RECORD))
    assert read_calibration(path) == RECORD
    plain = replace(RECORD, merged=1, held_out=())
    path.write_text(cluster_toml(_cluster(), (), plain))
    assert read_calibration(path) == plain


def test_the_cluster_is_the_same_with_and_without(tmp_path: Path) -> None:
    with_record, without = tmp_path / "a.toml", tmp_path / "b.toml"
    with_record.write_text(cluster_toml(_cluster(), (), RECORD))
    without.write_text(cluster_toml(_cluster()))
    assert read_cluster_file(with_record, "a") == read_cluster_file(without, "b")
    assert read_calibration(without) is None
    assert read_calibration(tmp_path / "none.toml") is None


def test_a_mistake_in_the_table_is_told(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    text = cluster_toml(_cluster(), (), RECORD)
    path.write_text(text.replace("merged = 3", "merged = 0").replace("torch", "touch"))
    found = read_cluster_file(path, "a")
    assert isinstance(found, list)
    assert {problem.key for problem in found} == {"calibration.merged", "calibration.touch"}


def test_the_error_of_steps_is_the_clusters_and_stays_where_it_is_written_again(
    tmp_path: Path,
) -> None:
    off = replace(RECORD, held_out=(("products", 0.0625), ("steps", 0.0833)))
    first, again = tmp_path / "first.toml", tmp_path / "again.toml"
    first.write_text(cluster_toml(_cluster(), (), off))
    read = read_cluster_file(first, "a")
    assert isinstance(read, Cluster)
    assert dict(read.trainer)[STEP_ERROR] == 0.0833
    again.write_text(cluster_toml(read))
    assert read_cluster_file(again, "b") == read
