"""Write fitted constants into the package: of trainers and of devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import echelon
from echelon.cost.fit.solver import ConstantValues

PACKAGE = Path(echelon.__file__).parent
TRAINERS = PACKAGE / "cost" / "seconds" / "fitted_trainers.toml"
PRESETS = PACKAGE / "config" / "presets" / "clusters"
FILES: Mapping[str, tuple[str, ...]] = {
    "A100": ("a100-40gb", "a100-80gb", "a100-pcie", "a800"),
    "H100": ("h100", "h100-pcie", "h200", "h800"),
    "B200": ("b100", "b200"),
    "GB200": ("gb200",),
    "B300": ("b300",),
    "GB300": ("gb300",),
    "V100": ("v100-16gb", "v100-32gb"),
    "MI300X": ("mi300x", "mi325x"),
    "RTX4090": ("rtx4090",),
    "RTX5090": ("rtx5090",),
    "RTXPRO6000": ("rtx-pro-6000",),
    "L40S": ("l40s",),
}
"""The presets whose devices are of a generation that is fitted."""
UNKNOWN: Mapping[str, tuple[str, ...]] = {
    "family torch": ("generic", "echelon"),
    "trainer generic": ("generic", "echelon"),
}
"""Trainers of which nobody published a run: they have the mean of their kin, and what is known of
trainers that have no name."""
HEAD = """# Constants of generations of trainers, fitted to published runs.
#
# Written by `python -m bench.accuracy.fit FILE.csv --write`; what each is, `TrainerConstants` in
# inputs.py says. A generation's constants that no run tells are what bench/accuracy/priors.py
# takes them to be.
"""


def write_constants(values: ConstantValues) -> None:
    """Write the constants that a fit found, to three digits."""
    trainers: dict[str, dict[str, float]] = {}
    devices: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        kind, key, field = name.split(" ")
        for each in UNKNOWN.get(f"{kind} {key}", () if kind == "family" else (key,)):
            into = devices if kind == "device" else trainers
            into.setdefault(each, {})[field] = float(f"{value:.3g}")
    if trainers:
        rows = "".join(_trainer(key, trainers[key]) for key in sorted(trainers))
        TRAINERS.write_text(HEAD + rows, encoding="utf-8")
    for key, found in devices.items():
        for stem in FILES[key]:
            _put(preset_file(PRESETS, stem), found)


def preset_file(folder: Path, stem: str) -> Path:
    """Return the file of a preset, in whichever folder of a family it stands."""
    (path,) = folder.rglob(f"{stem}.toml")
    return path


def _trainer(key: str, found: Mapping[str, float]) -> str:
    return f"\n[{key}]\n" + "".join(f"{field} = {value!r}\n" for field, value in found.items())


def _put(path: Path, found: Mapping[str, float]) -> None:
    """Replace values of [device.efficiency]; what is not there yet comes at its end."""
    before, mark, after = path.read_text(encoding="utf-8").partition("[device.efficiency]\n")
    table, gap, rest = after.partition("\n\n")
    for field, value in found.items():
        line = f"{field} = {value:g}"
        table, changed = re.subn(rf"^{field} = .*$", line, table, flags=re.MULTILINE)
        if not changed:
            table += f"\n{line}"
    path.write_text(before + mark + table + gap + rest, encoding="utf-8")
