"""What a foreign file is, before its keys are read: its kind, its syntax, its command."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.foreign.command_line import parse_command
from echelon.config.foreign.importer import import_file, told_kind
from echelon.config.foreign.sources import parse_json, parse_yaml
from echelon.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('\n {"train_batch_size": 8}', "deepspeed"),
        ("# a comment\ndistributed_type: FSDP", "accelerate"),
        ("debug: false\nfsdp_config: {}", "accelerate"),
        ("torchrun x.py --tensor-model-parallel-size 2", "megatron"),
        ("python x.py --micro-batch-size 2", "megatron"),
    ],
)
def test_the_content_tells_the_kind(text: str, kind: str) -> None:
    assert told_kind(Path("file"), text) == kind


def test_what_tells_nothing_asks_for_the_kind(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("stage: 3\n")
    with pytest.raises(ConfigError) as caught:
        import_file(path)
    assert caught.value.rules == ("import-kind",)
    assert "--kind deepspeed" in caught.value.problems[0].works


@pytest.mark.parametrize(
    "text", ["{", "[1]", "3", '{"a": 1, "a": 2}', '{"a": {"b": 1, "b": 1}}', "[" * 100_000]
)
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_json(Path("file"), text)
    assert caught.value.rules == ("import-syntax",)


@pytest.mark.parametrize(
    "text",
    ["a: [", "- 1", "text", "a: 1\na: 2", "a: !!python/object:os.system {}", "a: {b: 1, b: 2}"],
)
def test_what_is_no_yaml_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(Path("file"), text)
    assert caught.value.rules == ("import-syntax",)


def test_a_missing_file_and_one_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        import_file(tmp_path / "absent.json")
    assert caught.value.rules == ("no-such-file",)
    path = tmp_path / "binary.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ConfigError) as caught:
        import_file(path)
    assert caught.value.rules == ("import-syntax",)


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
