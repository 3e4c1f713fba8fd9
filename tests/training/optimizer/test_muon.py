"""The Newton-Schulz iteration of Muon."""

from __future__ import annotations

import torch

from echelon.training.optimizer.muon import newton_schulz


def test_the_orthogonal_factor_has_singular_values_near_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((6, 6), (5, 9), (9, 5)):
        update = torch.randn(*shape, dtype=torch.float64, generator=generator)
        u, sizes, v = torch.linalg.svd(update, full_matrices=False)
        result = newton_schulz(update, 5)
        assert result.shape == update.shape
        # The polynomial acts on singular values; singular vectors stay.
        inner = u.t() @ result @ v.t()
        torch.testing.assert_close(inner, inner.diag().diag(), rtol=0, atol=1e-12)
        assert 0.3 < float(inner.diag().min()) <= float(inner.diag().max()) < 1.3
        assert float(sizes.max() / sizes.min()) > 1.5
    assert not newton_schulz(torch.zeros(3, 4), 5).any()
    assert newton_schulz(torch.ones(2, 3, dtype=torch.bfloat16), 1).dtype == torch.float32
