"""A launch line in the place of a file; ZeRO on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.api.converting import import_run
from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.core.errors import ConfigError

HOROVOD = "horovodrun -np 4 -H localhost:4 python pytorch_mnist.py --batch-size 64 --fp16-allreduce"
MEGATRON = (
    "torchrun --nproc_per_node {ranks} pretrain_gpt.py --num-layers 4 --hidden-size 512 "
    "--num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 8 --bf16 --attention-dropout 0 "
    "--vocab-size 32000 --tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4"
)
DEEPSPEED = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
ACCELERATE = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nnum_processes: {ranks}\n"


def value(line: str | Path, key: str, ranks: int | None = None) -> object:
    """Return a setting of an imported run that has no problem."""
    found = import_run(line, ranks=ranks).found
    assert found.is_whole, found.invalid
    return found.settings[key].value


def test_a_line_of_horovod_is_read_as_its_guide_says() -> None:
    assert value(HOROVOD, "mesh.dp_replicate") == 4
    assert value(HOROVOD, "batch.global_sequences") == 256


def test_a_line_of_torchrun_has_the_flags_of_its_script() -> None:
    line = MEGATRON.format(ranks=2)
    assert value(line, "model.hidden") == 512
    assert value(line, "mesh.dp_replicate") == 2
    assert import_run(line).found.kind == "megatron"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("ds.json", json.dumps(DEEPSPEED), "deepspeed --num_gpus 4 train.py --deepspeed_config "),
        ("fsdp.yaml", ACCELERATE.format(ranks=4), "accelerate launch --config_file="),
    ],
)
def test_the_file_that_a_line_names_is_read_for_its_ranks(
    name: str, text: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    command = f"{line}{tmp_path / name} train.py"
    assert value(command, "mesh.dp_shard") == 4
    assert import_run(command).found.path == tmp_path / name


def test_a_line_that_says_nothing_and_a_file_that_is_not_there_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        import_run("torchrun --nproc_per_node 2 train.py")
    assert caught.value.rules == ("import-kind",)
    with pytest.raises(ConfigError) as caught:
        import_run("no such file.json")
    assert caught.value.rules == ("no-such-file",)


def test_a_line_is_written_as_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.toml"
    assert main(["import", MEGATRON.format(ranks=2), "--out", str(out)]) == 0
    assert "hidden = 512" in out.read_text()
    assert load_job(out).plan.mesh.world_size == 2
    capsys.readouterr()


@pytest.mark.parametrize("tool", ["megatron", "deepspeed", "stage 3", "accelerate"])
def test_a_stage_of_one_rank_becomes_0_and_says_so(tool: str, tmp_path: Path) -> None:
    file, ranks = tmp_path / "file", None
    if tool == "megatron":
        file.write_text(f"{MEGATRON.format(ranks=1)} --use-distributed-optimizer\n")
    elif tool == "accelerate":
        file.write_text(ACCELERATE.format(ranks=1))
    else:
        zero = {"stage": 2}
        if tool == "stage 3":
            zero = {"stage": 3, "stage3_prefetch_bucket_size": 5e7, "zero_hpz_partition_size": 1}
        file.write_text(json.dumps({**DEEPSPEED, "zero_optimization": zero}))
        ranks = 1
    run = import_run(file, ranks=ranks)
    assert run.found.is_whole, run.found.invalid
    assert run.found.settings["zero.stage"].value == 0
    told = [row.why for row in run.rows if row.setting == "zero.stage"]
    stage = {"megatron": 1, "deepspeed": 2}.get(tool, 3)
    assert told == [f"stage {stage} of one rank shares nothing"]
    out = tmp_path / "run.toml"
    run.write(out)
    assert load_job(out).plan.layout.zero.stage == 0


def test_a_stage_that_the_user_sets_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(DEEPSPEED))
    run = import_run(file, ranks=1, settings=["zero.stage=1"])
    assert [one.rule for one in run.found.invalid] == ["zero-shares-out"]
