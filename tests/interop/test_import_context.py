"""What is known beside a file comes from the settings that its run builds on."""

from __future__ import annotations

from echelon.config.entries import merge
from echelon.config.setting_layers import gather_layers
from echelon.interop.import_context import import_context


def test_a_preset_gives_model_devices_and_degrees() -> None:
    layers = gather_layers("nano", ["cluster.preset=16xh100", "mesh.tp=2"]).layers
    found = import_context(merge(layers), 4)
    assert found.model is not None
    assert (found.devices, found.cluster, found.ranks) == (16, "16xh100", 4)
    assert (found.degrees["tp"], found.model_ranks, found.data_ranks) == (2, 2, 1)
    assert "mesh.tp" in found.keys_set
    assert found.stage_blocks == found.model.layers
    whole = found.with_degrees(tp=1)
    assert 0 < found.block_elements < whole.block_elements


def test_without_a_model_sizes_are_unknown() -> None:
    found = import_context({}, None)
    assert found.model is None
    assert (found.block_elements, found.stage_blocks) == (0, 0)
