"""The options of a pipeline measurement that a test runs."""

from __future__ import annotations

from pathlib import Path

from bench.harness.interleave import Options
from bench.pipeline.spec import PIPELINE_SIZES


def options_of(folder: Path) -> Options:
    """Return options of one short round, everything written into `folder`."""
    return Options(
        modes=(),
        size=PIPELINE_SIZES["tiny"],
        rounds=1,
        steps=2,
        warmup=1,
        num_peers=9,
        with_echelon=True,
        peers_home=folder / "peers",
        json=None,
        logs=folder,
    )
