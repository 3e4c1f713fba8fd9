# SPDX-License-Identifier: Apache-2.0
"""`echelon import` and `echelon export`: plans and trained weights of other tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from echelon.api.converting import export as export_run
from echelon.api.converting import import_run
from echelon.api.exporting import ExportedWeights, WeightFormat, export_weights
from echelon.cli.flags import Json, Settings, bad_argument, require_run_file
from echelon.cli.output import note, print_json, print_result, working
from echelon.core.plan import DType
from echelon.core.units import decimal_bytes
from echelon.interop.importer import ImportedRun, keys_by_fate, mapping_rows, summary_lines
from echelon.interop.tools import TargetName, ToolName, describe_files
from echelon.planner.view.text_layout import wrap_text

AnyRun = Annotated[
    str, Parameter(help="A run.toml, a preset, a plan.json, or the folder of a run.")
]
_NEXT: Mapping[WeightFormat, str] = {
    "hf": 'AutoModelForCausalLM.from_pretrained("{folder}")',
    "echelon": "--set train.weights={folder} --set model.hf_config={folder}",
    "dcp": 'torch.distributed.checkpoint.load(state, checkpoint_id="{folder}")',
    "deepspeed": 'engine.load_checkpoint("{folder}")   # checkpoint.load_universal = true',
    "megatron": "--load {folder} --ckpt-format torch_dist --finetune",
    "megatron-legacy": "--load {folder} --ckpt-format torch --finetune",
}
"""What reads a folder."""


def import_(
    file: Annotated[str, Parameter(help=f"{describe_files()}; or the line that starts it.")],
    /,
    *,
    tool: Annotated[
        ToolName | None, Parameter(name="--from", help="Whose FILE is; else its content tells.")
    ] = None,
    out: Annotated[
        Path | None, Parameter(help="The run.toml to write; without it nothing is written.")
    ] = None,
    extends: Annotated[
        str | None, Parameter(help="The preset or run file with the model and the data: else nano.")
    ] = None,
    ranks: Annotated[int | None, Parameter(help="Ranks that the launcher starts.")] = None,
    launcher: Annotated[
        str, Parameter(help="The line of a launcher, or its file: it says the ranks.")
    ] = "",
    allow: Annotated[
        tuple[str, ...],
        Parameter(show_default=False, help="Drop this refused key, or all; repeat for more."),
    ] = (),
    settings: Settings = (),
    json: Json = False,
) -> int:
    """Turn a configuration of another tool into a run.toml; show what became of each key.

    The run.toml comes out whatever the file holds. The exit status is 1 where a key is refused,
    because it would change the mathematics, or where the run does not load: the file says which.
    """
    require_run_file(out)
    if launcher and ranks is not None:
        raise bad_argument("--ranks and --launcher both say how many ranks there are", "--ranks N")
    if ranks is not None and ranks < 1:
        raise bad_argument(f"--ranks is {ranks}, and at least 1", "--ranks 1")
    started = launcher or ranks
    found = import_run(
        file, kind=tool, extends=extends, ranks=started, allow=allow, settings=settings
    )
    if out is not None:
        found.write(out)
    status = 0 if found.is_whole else 1
    if json:
        result = {
            "kind": found.kind,
            "file": None if out is None else str(out),
            "rows": [row.to_json() for row in found.rows],
            "summary": keys_by_fate(found),
            "assumed": list(found.assumptions),
            "refused": [problem.to_json() for problem in found.refused],
            "invalid": [problem.to_json() for problem in found.invalid],
            "toml": found.to_toml(None if out is None else out.parent),
        }
        print_json("import", result)
        return status
    print("\n".join(_rows(mapping_rows(found))))
    print("\n" + "\n".join(summary_lines(found)))
    for line in _notes(found, out, named=extends is not None):
        note(line)
    return status


def _notes(found: ImportedRun, out: Path | None, *, named: bool) -> Iterator[str]:
    """Yield what is said beside the result: what was assumed, what is missing, what is next."""
    if found.extends is not None and not named:
        here = found.path
        yield f"model and data: {found.extends}, because {here} has none; --extends names yours"
    yield from (f"assumed: {what}" for what in found.assumptions)
    if found.refused:
        yield f"{len(found.refused)} refused: it would change the mathematics; --allow KEY drops it"
    yield from (problem.render() for problem in found.invalid)
    if out is None:
        yield "nothing is written; --out run.toml writes it"
    else:
        yield f"next: echelon config show {out}"


def _rows(rows: Iterable[tuple[str, str, str, str]]) -> Iterator[str]:
    """Yield each key with its value, and under it the settings that it became and why."""
    for key, value, setting, why in rows:
        if key:
            yield from wrap_text(f"{key} = {value}" if value else key, "", "    ")
        yield from wrap_text(f"-> {setting}: {why}", "    ", "       ")


def export(
    run: AnyRun,
    /,
    *,
    to: Annotated[TargetName, Parameter(help="Who is to read it.")],
    out: Annotated[
        Path | None, Parameter(help="The file to write; without it the text is printed.")
    ] = None,
    settings: Settings = (),
    json: Json = False,
) -> int:
    """Write a plan for another tool: read back, it is the same plan; what cannot be is refused."""
    found = export_run(run, to, settings=settings)
    if out is not None:
        found.write(out)
    elif not json:
        found.require_alone()
    if json:
        place = None if out is None else str(out)
        notes = [one.to_json() for one in found.notes]
        written = {"text": found.text, "beside": dict(found.beside), "notes": notes}
        print_json("export", {"to": to, "file": place, **written})
        return 0
    for one in found.notes:
        note(f"recorded, not said: {one.text()}")
    if out is None:
        print(found.text, end="")
    else:
        print("\n".join(str(out.parent / name) for name in (out.name, *found.beside)))
    return 0


EXPORT = App(name="export", default_command=export)
EXPORT.command(
    "echelon.cli.other_tools:weights",
    name="weights",
    help="Write trained weights for transformers, vLLM, DeepSpeed and others.",
)


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
    values = asdict(found) | {"folder": str(found.folder), "checkpoint": str(found.checkpoint)}
    return {name: value for name, value in values.items() if name != "rank"}


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
