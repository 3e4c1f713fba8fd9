"""Calibrations are merged into a file that a plan reads; each mistake is one clear error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.api.calibrating.merge import merge_calibrations
from echelon.config.cluster.file import CalibrationRecord, cluster_toml, read_calibration
from echelon.config.load import load_job
from echelon.core.cluster import Cluster, Device, Efficiency, Link
from echelon.core.errors import ConfigError

NODE = Cluster(
    name="2x core",
    device=Device(
        name="core",
        memory_bytes=2**33,
        memory_bandwidth=1e10,
        peak_flops=(("fp32", 1e11),),
        efficiency=Efficiency(half_depth=10.0),
    ),
    devices_per_node=2,
    nodes=1,
    links=(Link(name="Gloo on one host", degree=2, bandwidth=1e9, latency_s=1e-4),),
    backend="gloo",
)
RECORD = CalibrationRecord(
    date="2026-11-23",
    torch="2.13.0",
    echelon="0.1.0",
    nodes=1,
    ranks_per_node=2,
    held_out=(("products", 0.1), ("collectives", 0.2)),
)


def _file(path: Path, cluster: Cluster, record: CalibrationRecord | None = RECORD) -> Path:
    path.write_text(cluster_toml(cluster, (), record))
    return path


def _alone(cluster: Cluster) -> Cluster:
    return replace(cluster, devices_per_node=1, links=())


def test_a_device_and_its_links_are_one_file_that_a_plan_reads(tmp_path: Path) -> None:
    device = replace(NODE.device, efficiency=replace(NODE.device.efficiency, half_depth=30.0))
    files = [
        _file(tmp_path / "device.toml", _alone(replace(NODE, device=device))),
        _file(tmp_path / "links.toml", NODE),
    ]
    out = tmp_path / "both.toml"
    merged = merge_calibrations(files, out=out)
    cluster = load_job("nano", [f"cluster.file={out}", "mesh.dp_replicate=2"]).plan.cluster
    assert cluster == merged.cluster
    assert cluster.device.efficiency.half_depth == 20.0
    assert [link.degree for link in cluster.links] == [2]
    assert [path for path, _ in merged.clusters] == files


def test_the_record_of_several_nodes_is_of_all_of_them(tmp_path: Path) -> None:
    other = replace(
        RECORD, date="2026-11-24", torch="2.12.0", merged=2, held_out=(("products", 0.3),)
    )
    files = [_file(tmp_path / "a.toml", NODE), _file(tmp_path / "b.toml", NODE, other)]
    merged = merge_calibrations(files, out=tmp_path / "c.toml")
    assert merged.record == replace(
        RECORD,
        date="2026-11-24",
        torch="2.13.0, 2.12.0",
        merged=3,
        held_out=(("products", 0.3), ("collectives", 0.2)),
    )
    assert read_calibration(tmp_path / "c.toml") == merged.record
    again = merge_calibrations([files[0], tmp_path / "c.toml"], out=tmp_path / "d.toml")
    assert again.record.merged == 4


def _error(files: list[Path], out: Path) -> ConfigError:
    there = out.exists()
    with pytest.raises(ConfigError) as caught:
        merge_calibrations(files, out=out)
    assert out.exists() == there
    return caught.value


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "another"}, "device another, and "),
        ({"peak_flops": (("bf16", 1e11),)}, "dtypes bf16, and "),
        ({"efficiency": Efficiency(units=4)}, "multiprocessors 4, and "),
    ],
)
def test_other_devices_are_told(tmp_path: Path, change: dict[str, object], says: str) -> None:
    device = replace(NODE.device, **change)  # type: ignore[arg-type]
    files = [
        _file(tmp_path / "a.toml", NODE),
        _file(tmp_path / "b.toml", replace(NODE, device=device)),
    ]
    error = _error(files, tmp_path / "c.toml")
    assert error.rules == ("calibration-same-device",)
    assert says in error.problems[0].message


def test_gpus_of_one_name_with_other_memory_are_told(tmp_path: Path) -> None:
    clusters = [
        replace(NODE, backend="nccl", device=replace(NODE.device, memory_bytes=size, name="card"))
        for size in (40 * 2**30, 80 * 2**30, 81 * 2**30)
    ]
    files = [_file(tmp_path / f"{n}.toml", cluster) for n, cluster in enumerate(clusters)]
    error = _error(files[:2], tmp_path / "c.toml")
    assert error.rules == ("calibration-same-device",)
    assert "memory 80.00 GiB, and" in error.problems[0].message
    assert merge_calibrations(files[1:], out=tmp_path / "c.toml").record.merged == 2


def test_links_of_nodes_of_other_sizes_have_nothing_in_common(tmp_path: Path) -> None:
    link = replace(NODE.links[0], degree=4)
    files = [
        _file(tmp_path / "a.toml", NODE),
        _file(tmp_path / "b.toml", replace(NODE, devices_per_node=4, links=(link,))),
    ]
    error = _error(files, tmp_path / "c.toml")
    assert error.rules == ("calibration-same-node",)
    assert "a.toml has 2" in error.problems[0].message
    assert "b.toml has 4" in error.problems[0].message


def test_files_that_nothing_measured_and_files_named_twice_are_told_at_once(
    tmp_path: Path,
) -> None:
    first = _file(tmp_path / "a.toml", NODE)
    written = _file(tmp_path / "b.toml", NODE, None)
    error = _error([first, first, written, tmp_path / "none.toml"], tmp_path / "c.toml")
    assert error.rules == ("calibrations-to-merge", "calibrations-to-merge", "no-such-file")
    messages = [problem.message for problem in error.problems]
    assert "named twice" in messages[0]
    assert "no [calibration] table" in messages[1]


@pytest.mark.parametrize("count", [0, 1])
def test_it_takes_two(tmp_path: Path, count: int) -> None:
    files = [_file(tmp_path / "a.toml", NODE)][:count]
    error = _error(files, tmp_path / "c.toml")
    assert error.rules == ("calibrations-to-merge",)
    assert "two or more" in error.problems[0].message


def test_a_file_that_is_there_is_left(tmp_path: Path) -> None:
    files = [_file(tmp_path / name, NODE) for name in ("a.toml", "b.toml")]
    before = files[1].read_text()
    error = _error(files, files[1])
    assert error.rules == ("never-overwrite",)
    assert files[1].read_text() == before
