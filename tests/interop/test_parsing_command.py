"""The command line of a training script becomes its flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import ConfigError
from echelon.interop.parsing import parse_command


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
    assert dict(parse_command(Path("file"), text)) == {
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
        ("torchrun x.py --lr $LR", "$LR"),
        ("torchrun x.py ${ARGS[@]}", "${ARGS"),
        ("python x.py --lr 1 --lr 2", "--lr twice"),
        ("python x.py --name 'open", "is no command"),
        ("python x.py", "no command with --flags"),
    ],
)
def test_what_is_no_plain_command_is_refused(text: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_command(Path("file"), text)
    (problem,) = caught.value.problems
    assert problem.rule == "import-syntax"
    assert what in problem.message
