# SPDX-License-Identifier: Apache-2.0
"""The pipeline of a Megatron-LM command -> settings: virtual stages, and layers of each stage.

Megatron-LM interleaves as soon as a rank has several stages (Narayanan et al. 2021, section 2.2),
in groups of pp microbatches unless it is set otherwise, and cuts its layers evenly; with
--account-for-... the embedding or the loss counts as a layer there. A layout lists all stages:
"Et*3|(tt|)*29,t|L" is the embedding and three layers, 29 times two layers, one layer, the loss.
"""

from __future__ import annotations

import re

from echelon.interop.abilities import by_word
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, KeyReader
from echelon.interop.megatron.abilities import NAMES
from echelon.interop.ranks import blocks_of_stages

STAGES, VIRTUAL = "pipeline.stages", "pipeline.virtual_stages"
SCHEDULE = "pipeline.schedule"
INTERLEAVED = by_word(NAMES.schedules)["interleaved"]
_VIRTUAL_STAGES = "--num-virtual-stages-per-pipeline-rank"
_VIRTUAL_LAYERS = "--num-layers-per-virtual-pipeline-stage"
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
ENDS = tuple(f"--decoder-{end}-pipeline-num-layers" for end in ("first", "last"))
LAYOUT = "--pipeline-model-parallel-layout"
_ACCOUNTS = tuple(f"--account-for-{end}-in-pipeline-split" for end in ("embedding", "loss"))


def read_pipeline(reader: KeyReader, layers: int | None, context: ImportContext) -> None:
    """Map virtual stages and their schedule, and how layers are cut into stages."""
    pp = context.degrees["pp"]
    if reader.has(LAYOUT):
        _read_layout(reader, layers, pp)
        _read_group(reader, pp)
        return
    virtual = _read_virtual(reader, layers, pp)
    _read_group(reader, pp)
    _read_stages(reader, layers, pp, virtual)


def stages_of_layout(text: str) -> list[int] | None:
    """Return how many layers each stage of a layout has; None where it is none."""
    plain = re.sub(r"[\s,'\"]", "", text)
    plain = re.sub(r"\(([^()]*)\)\*(\d{1,4})", lambda found: found[1] * int(found[2]), plain)
    plain = re.sub(r"([Et|mL])\*(\d{1,4})", lambda found: found[1] * int(found[2]), plain)
    stages = plain.split("|")
    whole = "".join(stages)
    if re.fullmatch(r"Et+L", whole) is None:
        return None
    return [stage.count("t") for stage in stages]


def _read_layout(reader: KeyReader, layers: int | None, pp: int) -> None:
    """Map a list of all stages, in the order of the model; it says how many a rank has, too."""
    for key in (_VIRTUAL_STAGES, _VIRTUAL_LAYERS, *ENDS, *_ACCOUNTS):
        if reader.has(key):
            reader.refuse(key, f"{LAYOUT} says it already", setting=STAGES)
    sizes = stages_of_layout(str(reader.given[LAYOUT]))
    if sizes is None:
        why = "stages of E (embedding), t (layer) and L (loss), in this order, parted by |"
        reader.refuse(LAYOUT, why, suggestions=(f'{LAYOUT} "Et*2|t*2|t*2|t*2L"',), setting=STAGES)
    elif len(sizes) % pp or layers not in (None, sum(sizes)):
        why = f"{len(sizes)} stages on {pp} ranks, with {sum(sizes)} of {layers} layers"
        reader.refuse(LAYOUT, why, setting=STAGES)
    else:
        _set_sizes(reader, sizes, [LAYOUT])
        if (virtual := len(sizes) // pp) > 1:
            reader.set(LAYOUT, VIRTUAL, virtual, "stages of a pipeline rank")
            why = "a rank with several stages interleaves them"
            reader.set(LAYOUT, SCHEDULE, INTERLEAVED, why)


def _read_virtual(reader: KeyReader, layers: int | None, pp: int) -> int:
    source_key = _VIRTUAL_STAGES
    virtual = reader.take(source_key, VIRTUAL, COUNT, "stages of a pipeline rank") or 1
    size = reader.integer(_VIRTUAL_LAYERS, COUNT, setting=VIRTUAL)
    if size is not None and layers:
        if layers % (pp * size):
            reader.refuse(
                _VIRTUAL_LAYERS, f"{layers} layers / (pp {pp} x {size}) is no whole number"
            )
        else:
            virtual, source_key = layers // (pp * size), _VIRTUAL_LAYERS
            why = f"layers / (pp x layers of a virtual stage) = {layers} / ({pp} x {size})"
            reader.set(_VIRTUAL_LAYERS, VIRTUAL, virtual, why)
    if virtual > 1:
        why = "a rank with several stages interleaves them"
        reader.set(source_key, SCHEDULE, INTERLEAVED, why)
    return virtual


def _read_group(reader: KeyReader, pp: int) -> None:
    size = reader.integer(_GROUP, COUNT)
    if size == pp:
        reader.skip(_GROUP, f"interleaved-1f1b has groups of pp = {pp} microbatches")
    elif size is not None:
        reader.refuse(
            _GROUP, f"groups are of pp = {pp} microbatches", suggestions=(f"{_GROUP} {pp}",)
        )


def _read_stages(reader: KeyReader, layers: int | None, pp: int, virtual: int) -> None:
    """Map the layers of the first and the last stage, or what counts as one there; else even."""
    first, last = (reader.integer(key, COUNT, setting=STAGES) for key in ENDS)
    counted = [bool(reader.flag(key, setting=STAGES)) for key in _ACCOUNTS]
    given = [key for key in ENDS if reader.has(key)]
    as_layers = [key for key, on in zip(_ACCOUNTS, counted, strict=True) if on]
    if not layers or len(given) > sum(n is not None for n in (first, last)):
        return
    if not given and not as_layers:
        if pp > 1:
            why = "layers are cut evenly"
            reader.set(ENDS[0], STAGES, "even", why, source=reader.default)
        return
    if given and as_layers:
        reader.refuse(as_layers[0], f"{given[0]} says it already")
        return
    stages = pp * virtual
    if as_layers:
        size, rest = divmod(layers + len(as_layers), stages)
        if rest:
            reader.refuse(
                as_layers[0],
                f"{layers} layers + {len(as_layers)} are no multiple of {stages} stages",
            )
            return
        sizes = [size] * stages
        sizes[0] -= counted[0]
        sizes[-1] -= counted[1]
        given = as_layers
    else:
        # With virtual stages the two numbers are those of the first and the last rank's.
        middle, rest = pp - len(given), layers - (first or 0) - (last or 0)
        if virtual > 1:
            reader.refuse(given[0], "the split over virtual stages is listed in pipeline.stages")
            return
        if middle <= 0 or rest <= 0 or rest % middle:
            reader.refuse(given[-1], f"{rest} layers are left for {middle} stages between")
            return
        sizes = [n for n in (first, *[rest // middle] * middle, last) if n]
    _set_sizes(reader, sizes, given)


def _set_sizes(reader: KeyReader, sizes: list[int], given: list[str]) -> None:
    why = f"layers of each stage: {', '.join(map(str, sizes))}"
    reader.set(given[-1], STAGES, blocks_of_stages(sizes), why, source=reader.where(*given))
    reader.skip_all(given[:-1], f"together with {given[-1]}")
