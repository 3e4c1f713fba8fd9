"""What an Accelerate FSDP configuration gathers together, and ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.imports import Imports

NANO_BLOCK = 184_576


@pytest.fixture
def accelerate(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "accelerate")


def fsdp(version: int = 1, more: str = "", **keys: Any) -> str:
    """Return a configuration of four processes with these keys of fsdp_config."""
    table = "".join(f"\n  fsdp_{key}: {value}" for key, value in keys.items())
    return (
        f"distributed_type: FSDP\nnum_processes: 4\n{more}\n"
        f"fsdp_config:\n  fsdp_version: {version}{table}"
    )


@pytest.mark.parametrize(
    ("keys", "blocks"),
    [
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, 1),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": NANO_BLOCK}, 1),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": NANO_BLOCK + 1}, 2),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, 4),
        ({"auto_wrap_policy": "NO_WRAP"}, 4),
        ({}, 4),
    ],
)
def test_wrapping_is_a_number_of_blocks(
    accelerate: Imports, keys: dict[str, Any], blocks: int
) -> None:
    assert accelerate(fsdp(**keys)).job.plan.layout.zero.unit_blocks == blocks


@pytest.mark.parametrize(
    ("keys", "units"),
    [
        ({"backward_prefetch": "BACKWARD_PRE"}, 1),
        ({"backward_prefetch": "BACKWARD_POST"}, 0),
        ({"backward_prefetch": "NO_PREFETCH"}, 0),
        ({"backward_prefetch": "NO_PREFETCH", "forward_prefetch": "true"}, 1),
        ({"forward_prefetch": "yes"}, 1),
        ({"forward_prefetch": "off"}, 1),
    ],
)
def test_prefetch_is_one_setting_for_both_directions(
    accelerate: Imports, keys: dict[str, Any], units: int
) -> None:
    assert accelerate(fsdp(**keys)).job.plan.layout.zero.prefetch == units
