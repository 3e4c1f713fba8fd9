"""Which implementation of flash attention runs: chosen once, and only where it is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from echelon.core.errors import EnvironmentProblem
from echelon.models.attention import flash
from echelon.models.attention.flash import FlashAttention, flash_on
from echelon.models.attention.fused import FusedGpuKernel
from echelon.models.attention.local import AttentionRule, kernel_for

GPU = torch.device("cuda", 0)


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return what PyTorch was asked to run instead of its own, on a Hopper GPU with the package."""
    found: list[str] = []
    attention: Any = torch.nn.attention
    monkeypatch.setattr(attention, "activate_flash_attention_impl", found.append)
    monkeypatch.setattr(attention, "list_flash_attention_impls", lambda: ["FA3", "FA4"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(flash, "find_spec", lambda _: object())
    flash_on.cache_clear()
    yield found
    flash_on.cache_clear()


@pytest.mark.parametrize(
    ("kernel", "asked"), [("auto", ["FA3"]), ("flash-3", ["FA3"]), ("flash", []), ("cudnn", [])]
)
def test_the_third_is_taken_where_it_is_there(
    kernel: Any, asked: list[str], activated: list[str]
) -> None:
    found = flash_on(GPU, kernel)
    assert type(found) is FlashAttention
    assert found.is_third is bool(asked)
    assert flash_on(GPU, kernel) is found
    assert activated == asked


@pytest.mark.parametrize("kernel", ["auto", "flash", "flash-3", "cudnn"])
@pytest.mark.parametrize("there", [True, False])
def test_squares_are_cudnns_where_the_third_is_not(
    kernel: Any, there: bool, activated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third comes first under "auto"; a GPU is asked for its own generation."""
    if kernel == "flash-3" and not there:
        return
    monkeypatch.setattr(torch.version, "hip", None)
    if not there:
        monkeypatch.setattr(flash, "find_spec", lambda _: None)
    rule = AttentionRule(kernel=kernel, planned_capability=8.0)
    chosen = kernel_for(GPU, torch.bfloat16, 64, rule)
    assert isinstance(chosen, FusedGpuKernel)
    assert chosen.cudnn is (kernel == "cudnn" or (kernel == "auto" and not there))
    assert activated == (["FA3"] if there and kernel in ("auto", "flash-3") else [])


@pytest.mark.parametrize("missing", ["package", "generation", "PyTorch"])
def test_where_it_is_not_there_auto_is_the_second_and_flash_3_an_error(
    missing: str, activated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "package":
        monkeypatch.setattr(flash, "find_spec", lambda _: None)
    elif missing == "generation":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    else:
        monkeypatch.delattr(torch.nn.attention, "list_flash_attention_impls")
    flash_on(GPU, "auto")
    assert activated == []
    with pytest.raises(EnvironmentProblem) as caught:
        flash_on(GPU, "flash-3")
    assert caught.value.rules == ("flash-3-installed",)


def test_a_rehearsal_needs_no_package() -> None:
    assert type(flash_on(torch.device("meta"), "flash-3")) is FlashAttention
