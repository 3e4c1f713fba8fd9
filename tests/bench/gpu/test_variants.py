"""Every way that is timed runs, on small tensors in Triton's interpreter."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from tests.parallel.kernels.interpreted import DEVICE


def test_every_way_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from bench.gpu import variants

    monkeypatch.setattr(variants, "WIDTHS", ((3, 1024),))
    monkeypatch.setattr(variants, "HEADS", ((2, 4, 2, 8),))
    monkeypatch.setattr(variants, "MIXTURES", ((2, 2, 8),))
    seen: dict[str, int] = {}
    for way in variants.ways(DEVICE, 1 << 16):
        changes = patch.multiple(way.module, **way.changes) if way.module else patch.dict({}, {})
        seen[way.group] = seen.get(way.group, 0) + (", now" in way.name)
        if seen[way.group] == 1 or ", now" in way.name:
            with changes:
                way.call()
        assert way.num_bytes > 0
    assert len(seen) == 5
    assert set(seen.values()) == {1}


def test_without_a_gpu_nothing_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    from bench.gpu import variants

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert variants.main([]) == 3
    assert "no CUDA device" in capsys.readouterr().err
