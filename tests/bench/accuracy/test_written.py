"""What a fit writes into the package: the table of trainers, the presets of devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.accuracy import fit as written
from bench.accuracy.fit import PRESETS, TABLES, TRAINERS, preset_file, write_constants
from echelon.cost.seconds.trainers import FITTED


def test_the_constants_of_the_package_are_written_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        f"trainer {key} {name}": v for key, found in FITTED.items() for name, v in found.items()
    }
    monkeypatch.setattr(written, "TRAINERS", tmp_path / TRAINERS.name)
    assert len(values) > 200
    write_constants(values)
    assert (tmp_path / TRAINERS.name).read_text() == TRAINERS.read_text()


def test_a_device_keeps_the_rest_of_its_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = TRAINERS.read_text()
    for stem in TABLES["device"]["V100"]["presets"]:
        (tmp_path / f"{stem}.toml").write_bytes(preset_file(PRESETS, stem).read_bytes())
    monkeypatch.setattr(written, "PRESETS", tmp_path)
    write_constants({"device V100 matmul": 0.123456, "device V100 new": 2.0})
    for stem in TABLES["device"]["V100"]["presets"]:
        old, new = (preset_file(folder, stem).read_text() for folder in (PRESETS, tmp_path))
        changed = set(new.splitlines()) - set(old.splitlines())
        assert changed == {"matmul = 0.123", "new = 2"}
        assert len(new.splitlines()) == len(old.splitlines()) + 1
    assert TRAINERS.read_text() == before


def test_every_device_that_is_fitted_has_its_presets() -> None:
    for known in TABLES["device"].values():
        for stem in known["presets"]:
            assert "[device.efficiency]\n" in preset_file(PRESETS, stem).read_text()
