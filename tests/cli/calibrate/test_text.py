"""What is printed of calibrations: in 80 columns, with what was held out, and as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.api.calibrating.machine import MachineCalibration
from echelon.api.calibrating.merge import MergedCalibration
from echelon.cli.calibrate import machine_json, machine_report, merged_report
from echelon.config.cluster.file import CalibrationRecord
from echelon.core.cluster import Cluster, Device, Link
from echelon.cost.fit.device import DeviceFit
from echelon.cost.fit.links import LinkFit
from echelon.cost.fit.samples import Collective, MatmulKernel, TimedCollective, TimedKernel

NEAR = Link(name="wire", degree=2, bandwidth=1e9, latency_s=1e-4)
FAR = Link(name="net", degree=4, bandwidth=1e8, latency_s=1e-3)


def _links(link: Link, stride: int) -> LinkFit:
    sizes = (1024, 4096, 2**20)
    timed = [
        TimedCollective(
            collective=Collective(kind="all_reduce", degree=2, num_bytes=size, stride=stride),
            seconds=1e-3,
            fitted=size != 4096,
        )
        for size in sizes
    ]
    return LinkFit(link=link, timed=tuple(timed), errors=(0.1, 0.5, -0.3), at_bound=("efficiency",))


def _calibration() -> MachineCalibration:
    device = Device(
        name="core", memory_bytes=2**30, memory_bandwidth=1e10, peak_flops=(("fp32", 1e11),)
    )
    timed = [
        TimedKernel(
            kernel=MatmulKernel(rows=n, depth=n, columns=n), seconds=1e-5, running=2, fitted=n != 64
        )
        for n in (32, 64, 128)
    ]
    return MachineCalibration(
        cluster=Cluster(
            name="4x core", device=device, devices_per_node=2, nodes=2, links=(NEAR, FAR)
        ),
        device=DeviceFit(
            device=device, timed=tuple(timed), errors=(0.02, -0.4, 0.04), at_bound=("matmul",)
        ),
        links=_links(NEAR, 1),
        network=_links(FAR, 2),
        trainer=None,
        record=CalibrationRecord(
            date="2026-11-23",
            torch="2.13.0",
            echelon="0.1.0",
            nodes=2,
            ranks_per_node=2,
            held_out=(("products", 0.4),),
        ),
        out=Path("cluster.toml"),
    )


def test_both_tiers_are_shown_and_what_is_held_out_has_a_sign() -> None:
    """S12: so is the error of each link at held-out sizes, beside that of the fitted ones."""
    text = machine_report(_calibration())
    assert [line for line in text.splitlines() if len(line) > 80] == []
    lines = [line.split() for line in text.splitlines()]
    assert ["64x64x64", "2", "10.0", "us", "6.0", "us", "-40%", "*"] in lines
    assert ["32x32x32", "2", "10.0", "us", "10.2", "us", "+2%"] in lines
    assert text.index("Collectives inside of a node") < text.index("Collectives between nodes")
    assert "all_reduce 2 ranks, 2 apart 4 KiB" in text
    # Of each kind: how many were fitted, mean and median of their errors, then those held out.
    assert ["matmulkernel", "2", "3%", "3%", "1", "40%", "40%"] in lines
    assert ["network", "2", "20%", "20%", "1", "50%", "50%"] in lines
    bounds = [line for line in text.splitlines() if "at the bound" in line]
    assert [line.split()[:2] for line in bounds] == [
        ["matmul", "0.8"],
        ["link", "efficiency"],
        ["network", "efficiency"],
    ]


def test_json_has_every_time_and_how_it_was_measured() -> None:
    told = machine_json(_calibration())
    assert isinstance(told["calibration"], dict)
    assert told["calibration"]["held_out"] == {"products": 0.4}
    assert isinstance(told["collectives"], list)
    assert [one["stride"] for one in told["collectives"]] == [1, 1, 1, 2, 2, 2]
    assert isinstance(told["kernels"], list)
    assert [one["fitted"] for one in told["kernels"]] == [True, False, True]


@pytest.mark.parametrize("columns", [60, 80, 120, 160])
def test_no_line_is_wider_than_the_page(columns: int) -> None:
    long = _calibration()
    pages = [machine_report(long, columns=columns)]
    merged = MergedCalibration(
        cluster=long.cluster,
        record=long.record,
        clusters=((Path("a.toml"), long.cluster),),
        out=long.out,
    )
    pages.append(merged_report(merged, columns=columns))
    for page in pages:
        *lines, copied = page.splitlines()
        # What is to be copied is whole, as long as the path is.
        assert copied == '  --cluster cluster.toml, or --set cluster.file="cluster.toml"'
        assert max(map(len, lines)) <= columns
        assert "1e+11" not in page
        assert "100 GFLOP/s" in page
    assert "64x64x64" in pages[0]
