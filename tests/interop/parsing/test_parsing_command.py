"""The command line of a training script becomes its flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import ConfigError
from echelon.interop.parsing import command_words, parse_command


def flags_of(text: str) -> dict[str, object]:
    """Return the flags of the command in a script."""
    here = Path("file")
    return dict(parse_command(here, command_words(here, text)))


def test_a_command_is_its_flags() -> None:
    text = """
    #!/bin/bash
    export CUDA_DEVICE_MAX_CONNECTIONS=1
    torchrun --nproc_per_node 8 --nnodes=2 pretrain_gpt.py \\
      --num-layers 4 \\   # a comment
      # a whole line of it
      --bf16 --lr 1e-4 --split "949,50,1" \\
      --recompute-modules core_attn mlp --seed -1 2>&1 | tee log.txt --append
    """
    assert flags_of(text) == {
        "--nproc-per-node": 8,
        "--nnodes": 2,
        "--num-layers": 4,
        "--bf16": True,
        "--lr": 1e-4,
        "--split": "949,50,1",
        "--recompute-modules": ["core_attn", "mlp"],
        "--seed": -1,
    }


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("python x.py --name 'open", "is no command"),
        ("python x.py", "no command with --flags"),
    ],
)
def test_what_is_no_plain_command_is_refused(text: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flags_of(text)
    (problem,) = caught.value.problems
    assert problem.rule == "import-syntax"
    assert what in problem.message


def test_the_last_of_two_flags_counts_and_what_is_not_known_stays() -> None:
    assert flags_of("python x.py --lr 1 --lr 2 --save $1") == {"--lr": 2, "--save": "$1"}
    assert flags_of("a=8\ntorchrun x.py ${ARGS[@]} --x $a") == {"--x": 8}
