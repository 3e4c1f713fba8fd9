"""Which kernel is chosen, and that the calls for a GPU fit PyTorch's schemas.

The GPU kernels compute nothing here: their calls are made on meta tensors, which checks shapes and
arguments. `test_gpu.py` compares numbers where there is a GPU.
"""

from __future__ import annotations

import pytest
import torch

from echelon.core.attention_mask import Band
from echelon.models.attention import flash
from echelon.models.attention import fused as fused_gpu
from echelon.models.attention.fused import FusedCpuKernel, FusedGpuKernel
from echelon.models.attention.interface import SavedAttention, ScoreRule
from echelon.models.attention.local import NO_CAP, AttentionRule, kernel_for
from echelon.models.attention.plain import PlainKernel

CAPPED = AttentionRule(soft_cap=30.0)
FULL, CAUSAL, EDGE = Band(None, None), Band(0, None), Band(0, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_cpu_has_a_fused_kernel_for_all_but_soft_caps(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    assert isinstance(kernel_for(cpu, dtype, 64, NO_CAP), FusedCpuKernel)
    assert isinstance(kernel_for(cpu, dtype, 64, CAPPED), PlainKernel)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "soft_cap", "capability", "flash"),
    [
        (torch.bfloat16, 64, None, (9, 0), True),
        (torch.bfloat16, 64, None, (7, 5), False),
        (torch.bfloat16, 64, 30.0, (9, 0), None),
        (torch.float64, 64, None, (9, 0), None),
        (torch.bfloat16, 60, None, (9, 0), None),
    ],
)
def test_a_gpu_has_fused_kernels_for_what_they_take(
    dtype: torch.dtype,
    head_dim: int,
    soft_cap: float | None,
    capability: tuple[int, int],
    flash: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    kernel = kernel_for(torch.device("cuda", 0), dtype, head_dim, AttentionRule(soft_cap=soft_cap))
    if flash is None:
        assert isinstance(kernel, PlainKernel)
    else:
        assert isinstance(kernel, FusedGpuKernel)
        assert (kernel.flash is not None) == flash


def test_other_devices_compute_by_the_formulas() -> None:
    assert isinstance(kernel_for(torch.device("xla"), torch.float32, 64), PlainKernel)


def test_a_rehearsal_takes_the_kernels_of_a_gpu() -> None:
    meta = torch.device("meta")
    assert isinstance(kernel_for(meta, torch.bfloat16, 64, NO_CAP), FusedGpuKernel)
    assert isinstance(kernel_for(meta, torch.bfloat16, 64, CAPPED), PlainKernel)
    assert isinstance(kernel_for(meta, torch.float64, 64, NO_CAP), PlainKernel)


@pytest.mark.parametrize(
    ("dtype", "rows", "band", "by"),
    [
        (torch.bfloat16, (20, 20), FULL, "flash"),
        (torch.bfloat16, (20, 20), CAUSAL, "flash"),
        (torch.bfloat16, (20, 30), FULL, "flash"),
        (torch.bfloat16, (30, 20), CAUSAL, "window"),
        (torch.float16, (20, 20), CAUSAL, "flash"),
        (torch.bfloat16, (20, 20), EDGE, "window"),
        (torch.bfloat16, (20, 20), CAUSAL, "cudnn"),
        (torch.bfloat16, (20, 20), CAUSAL, "auto on Hopper"),
        (torch.bfloat16, (20, 20), EDGE, "window on Hopper"),
        (torch.bfloat16, (20, 30), FULL, "cudnn"),
        (torch.bfloat16, (1, 1), CAUSAL, "flash on Hopper"),
        (torch.float32, (20, 20), CAUSAL, "efficient"),
        (torch.float32, (20, 30), EDGE, "efficient"),
    ],
)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_calls_for_a_gpu_fit_their_schemas(
    dtype: torch.dtype,
    rows: tuple[int, int],
    band: Band,
    by: str,
    heads: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    for way in ("flash", "cudnn", "efficient"):
        for name in (f"_{way}", f"_{way}_backward"):
            monkeypatch.setattr(fused_gpu, name, _noted(called, fused_gpu, name))
    for name in ("_forward", "_backward"):
        monkeypatch.setattr(flash, name, _noted(called, flash, name))
    q, dout = (torch.empty(rows[0], 2, heads[0], 8, dtype=dtype, device="meta") for _ in range(2))
    k, v = (torch.empty(rows[1], 2, heads[1], 8, dtype=dtype, device="meta") for _ in range(2))
    scores = ScoreRule(band=band, scale=0.5)
    by, on_hopper, _ = by.partition(" on Hopper")
    rule = AttentionRule(
        kernel="cudnn" if by == "cudnn" else "auto", planned_capability=9.0 if on_hopper else 8.0
    )
    kernel = kernel_for(q.device, dtype, 8, rule)
    by = "cudnn" if by == "auto" else by
    out, lse = kernel.forward(q, k, v, scores)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == ((2, heads[0], rows[0]), torch.float32)
    gradients = kernel.backward(dout, SavedAttention(q, k, v, out, lse), scores)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    way = "" if by == "window" else f"_{by}"
    assert called == [way or "_forward", f"{way}_backward"]


def _noted(called: list[str], module: object, name: str) -> object:
    kernel = getattr(module, name)

    def call(*args: object, **kwargs: object) -> object:
        called.append(name)
        return kernel(*args, **kwargs)

    return call


def test_gradients_of_repeated_heads_are_summed() -> None:
    x = torch.randn(5, 2, 2, 3).requires_grad_()
    (wanted,) = torch.autograd.grad(x.repeat_interleave(3, dim=2).sin().sum(), x)
    copies = fused_gpu._repeated(x.detach(), 6)
    assert torch.equal(copies, x.repeat_interleave(3, dim=2))
    found = fused_gpu._summed(copies.cos().permute(1, 2, 0, 3), 2)
    torch.testing.assert_close(found.permute(2, 0, 1, 3), wanted)


def test_a_gpu_computes_bands_of_float16_plainly() -> None:
    """Its fused kernel wants a bias in the dtype of the queries, and no float16 hides every score.

    Both kernels give the same on CPU, where the fused one could not even run.
    """
    generator = torch.Generator().manual_seed(5)
    q, k, v, dout = (torch.randn(6, 1, 2, 16, generator=generator).half() for _ in range(4))
    scores = ScoreRule(band=EDGE, scale=0.25)
    plain, gpu = PlainKernel(), FusedGpuKernel(None)
    out, lse = plain.forward(q, k, v, scores)
    found, found_lse = gpu.forward(q, k, v, scores)
    assert torch.equal(out, found)
    assert torch.equal(lse, found_lse)
    attended = SavedAttention(q, k, v, out.half(), lse)
    for one, other in zip(
        plain.backward(dout, attended, scores), gpu.backward(dout, attended, scores), strict=True
    ):
        assert torch.equal(one, other)
