"""Which implementation of flash attention runs: chosen once, and only where it is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from echelon.core.errors import EnvironmentProblem
from echelon.models.attention import flash
from echelon.models.attention.flash import FlashAttention, flash_on

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
    assert type(flash_on(GPU, kernel)) is FlashAttention
    flash_on(GPU, kernel)
    assert activated == asked


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
