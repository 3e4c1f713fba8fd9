# SPDX-License-Identifier: Apache-2.0
"""`echelon export weights`: trained weights as a folder of Hugging Face, Echelon or a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from echelon.api.exporting import ExportedWeights, WeightFormat, export_weights
from echelon.cli.flags import Json
from echelon.cli.output import print_result
from echelon.cli.stderr import note, working
from echelon.core.plan import DType
from echelon.core.units import decimal_bytes

_NEXT: Mapping[WeightFormat, str] = {
    "hf": 'AutoModelForCausalLM.from_pretrained("{folder}")',
    "echelon": "--set train.weights={folder} --set model.hf_config={folder}",
    "dcp": 'torch.distributed.checkpoint.load(state, checkpoint_id="{folder}")',
    "deepspeed": 'engine.load_checkpoint("{folder}")   # checkpoint.load_universal = true',
    "megatron": "--load {folder} --ckpt-format torch_dist --finetune",
    "megatron-legacy": "--load {folder} --ckpt-format torch --finetune",
}
"""What reads a folder."""


def weights(
    run: Annotated[Path, Parameter(help="The run, or the checkpoint in one, whose weights.")],
    /,
    *,
    out: Annotated[Path, Parameter(help="The folder to write, which must be new.")],
    to: Annotated[WeightFormat, Parameter(help="Who is to read it.")] = "hf",
    dtype: Annotated[
        DType | None, Parameter(help="Of the tensors; without it, what the run computed in.")
    ] = None,
    model_type: Annotated[
        str | None, Parameter(help="Of transformers; without it, the first that says the model.")
    ] = None,
    file_bytes: Annotated[
        int | None, Parameter(help="The most bytes of a safetensors file; without it, 5 GB.")
    ] = None,
    threads: Annotated[
        int | None, Parameter(help="Tensors made at a time; without it, one for each core.")
    ] = None,
    ranks: Annotated[
        int | None, Parameter(help="Ranks, as processes, that write it; without it, 1.")
    ] = None,
    tp: Annotated[
        int | None, Parameter(help="Tensor ranks of megatron-legacy; without it, 1.")
    ] = None,
    pp: Annotated[
        int | None, Parameter(help="Pipeline ranks of megatron-legacy; without it, 1.")
    ] = None,
    adapters: Annotated[
        bool, Parameter(negative=(), help="The adapters alone, as PEFT keeps them.")
    ] = False,
    json: Json = False,
) -> int:
    """Write trained weights as a folder that transformers, vLLM, DeepSpeed and others read."""
    with working("writing weights", lines=not json):
        found = export_weights(
            run,
            out,
            to=to,
            dtype=dtype,
            model_type=model_type,
            file_bytes=file_bytes,
            threads=threads,
            ranks=ranks,
            tp=tp,
            pp=pp,
            adapters=adapters,
        )
    if found.rank != 0:
        return 0
    print_result("export weights", lambda: _as_json(found), lambda: _as_text(found), as_json=json)
    if adapters:
        note(f'next: PeftModel.from_pretrained(model, "{found.folder}")')
    else:
        note(f"next: {_NEXT[found.to].format(folder=found.folder)}")
    return 0


def _as_json(found: ExportedWeights) -> dict[str, object]:
    return {
        "folder": str(found.folder),
        "to": found.to,
        "model_type": found.model_type,
        "dtype": found.dtype,
        "tensors": found.tensors,
        "num_bytes": found.num_bytes,
        "files": list(found.files),
        "tokenizer": found.tokenizer,
        "checkpoint": str(found.checkpoint),
        "optimizer": found.optimizer,
        "ranks": found.ranks,
    }


def _as_text(found: ExportedWeights) -> str:
    count = f"{len(found.files)} file" + ("s" if len(found.files) > 1 else "")
    return "\n".join(
        (
            f"{found.folder}: {found.model_type}, {found.tensors} tensors, {found.dtype}, "
            f"{decimal_bytes(found.num_bytes)} in {count}",
            f"from {found.checkpoint}",
            f"tokenizer: {found.tokenizer}",
            *(["with what the optimizer keeps"] if found.optimizer else []),
            "",
        )
    )
