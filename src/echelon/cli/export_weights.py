"""`echelon export weights`: trained weights as a folder of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from echelon.api.exporting import FILE_BYTES, ExportedWeights, export_weights
from echelon.cli.flags import Json
from echelon.cli.output import note, print_result
from echelon.core.plan import DType
from echelon.core.units import decimal_bytes


def weights(
    run: Annotated[Path, Parameter(help="The run, or the checkpoint in one, whose weights.")],
    /,
    *,
    out: Annotated[Path, Parameter(help="The folder to write, which must be new.")],
    dtype: Annotated[
        DType | None, Parameter(help="Of the tensors; without it, what the run computed in.")
    ] = None,
    model_type: Annotated[
        str | None, Parameter(help="Of transformers; without it, the first that says the model.")
    ] = None,
    file_bytes: Annotated[int, Parameter(help="The most bytes of a file.")] = FILE_BYTES,
    threads: Annotated[
        int | None, Parameter(help="Files written at a time; without it, one for each core.")
    ] = None,
    adapters: Annotated[
        bool, Parameter(negative=(), help="The adapters alone, as PEFT keeps them.")
    ] = False,
    json: Json = False,
) -> int:
    """Write trained weights as a folder that transformers, vLLM and others read."""
    found = export_weights(
        run,
        out,
        dtype=dtype,
        model_type=model_type,
        file_bytes=file_bytes,
        threads=threads,
        adapters=adapters,
    )
    print_result("export weights", lambda: _as_json(found), lambda: _as_text(found), as_json=json)
    if adapters:
        note(f'next: PeftModel.from_pretrained(model, "{found.folder}")')
    else:
        note(f'next: AutoModelForCausalLM.from_pretrained("{found.folder}")')
    return 0


def _as_json(found: ExportedWeights) -> dict[str, object]:
    return {
        "folder": str(found.folder),
        "model_type": found.model_type,
        "dtype": found.dtype,
        "tensors": found.tensors,
        "num_bytes": found.num_bytes,
        "files": list(found.files),
        "tokenizer": found.tokenizer,
        "checkpoint": str(found.checkpoint),
    }


def _as_text(found: ExportedWeights) -> str:
    count = f"{len(found.files)} file" + ("s" if len(found.files) > 1 else "")
    return "\n".join(
        (
            f"{found.folder}: {found.model_type}, {found.tensors} tensors, {found.dtype}, "
            f"{decimal_bytes(found.num_bytes)} in {count}",
            f"from {found.checkpoint}",
            f"tokenizer: {found.tokenizer}",
            "",
        )
    )
