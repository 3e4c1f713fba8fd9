"""A run that was trained once for the tests of what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import echelon as ec
from tests.training.small_runs import TINY


def trained_run(folder: Path, settings: Sequence[str] = ()) -> ec.TrainResult:
    """Train a tiny model of bytes on a few lines, and return its run."""
    words = folder / "words.txt"
    words.write_text("".join(f"line {i} of {i * i % 97} words, more or less\n" for i in range(400)))
    places = [f'train.runs_dir="{folder}/runs"', f'data.source="{words}"']
    keys = {setting.split("=")[0] for setting in settings}
    tiny = [one for one in TINY if one.split("=")[0] not in keys]
    return ec.train("nano", settings=[*tiny, *places, "train.run_name=tiny", *settings])
