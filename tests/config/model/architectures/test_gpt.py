"""StarCoder 2, GPT-NeoX and Falcon are what transformers computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.model.architectures.beside import (
    names_of,
    require_its_files,
    require_the_same_numbers,
)

NAMED = pytest.mark.parametrize("name", names_of("starcoder2", "gpt_neox", "falcon"))


@NAMED
def test_logits_loss_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    require_the_same_numbers(name, tmp_path)


@NAMED
def test_its_files_are_read_and_its_config_is_written(name: str, tmp_path: Path) -> None:
    require_its_files(name, tmp_path)
