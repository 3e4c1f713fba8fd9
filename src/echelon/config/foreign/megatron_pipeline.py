"""The pipeline of a Megatron-LM command -> settings: virtual stages, and layers of each stage.

Megatron-LM interleaves as soon as a rank has several stages (Narayanan et al. 2021, section 2.2),
in groups of pp microbatches unless it is told otherwise, and cuts its layers evenly; with
--account-for-... the embedding or the loss counts as a layer there. A layout lists all stages:
"Et*3|(tt|)*29,t|L" is the embedding and three layers, 29 times two layers, one layer, the loss.
"""

from __future__ import annotations

import re

from echelon.config.foreign.ledger import COUNT, Ledger
from echelon.config.foreign.surroundings import Surroundings

STAGES, VIRTUAL = "pipeline.stages", "pipeline.virtual_stages"
SCHEDULE = "pipeline.schedule"
VIRTUAL_STAGES = "--num-virtual-stages-per-pipeline-rank"
VIRTUAL_LAYERS = "--num-layers-per-virtual-pipeline-stage"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
ENDS = tuple(f"--decoder-{end}-pipeline-num-layers" for end in ("first", "last"))
LAYOUT = "--pipeline-model-parallel-layout"
ACCOUNTS = tuple(f"--account-for-{end}-in-pipeline-split" for end in ("embedding", "loss"))


def read_pipeline(ledger: Ledger, layers: int | None, around: Surroundings) -> None:
    """Map virtual stages and their schedule, and how layers are cut into stages."""
    pp = around.degrees["pp"]
    if ledger.has(LAYOUT):
        _read_layout(ledger, layers, pp)
        _read_group(ledger, pp)
        return
    virtual = _read_virtual(ledger, layers, pp)
    _read_group(ledger, pp)
    _read_stages(ledger, layers, pp, virtual)


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


def _read_layout(ledger: Ledger, layers: int | None, pp: int) -> None:
    """Map a list of all stages, in the order of the model; it says how many a rank has, too."""
    for key in (VIRTUAL_STAGES, VIRTUAL_LAYERS, *ENDS, *ACCOUNTS):
        if ledger.has(key):
            ledger.refuse(key, f"{LAYOUT} says it already", setting=STAGES)
    sizes = stages_of_layout(str(ledger.given[LAYOUT]))
    if sizes is None:
        why = "stages of E (embedding), t (layer) and L (loss), in this order, parted by |"
        ledger.refuse(LAYOUT, why, works=(f'{LAYOUT} "Et*2|t*2|t*2|t*2L"',), setting=STAGES)
    elif len(sizes) % pp or layers not in (None, sum(sizes)):
        why = f"{len(sizes)} stages on {pp} ranks, with {sum(sizes)} of {layers} layers"
        ledger.refuse(LAYOUT, why, setting=STAGES)
    else:
        _set_sizes(ledger, sizes, [LAYOUT])
        if (virtual := len(sizes) // pp) > 1:
            ledger.set(LAYOUT, VIRTUAL, virtual, "stages of a pipeline rank")
            why = "a rank with several stages interleaves them"
            ledger.set(LAYOUT, SCHEDULE, "interleaved-1f1b", why)


def _read_virtual(ledger: Ledger, layers: int | None, pp: int) -> int:
    virtual, told_by = 1, VIRTUAL_STAGES
    if (count := ledger.whole(VIRTUAL_STAGES, COUNT, setting=VIRTUAL)) is not None:
        virtual = count
        ledger.set(VIRTUAL_STAGES, VIRTUAL, count, "stages of a pipeline rank")
    size = ledger.whole(VIRTUAL_LAYERS, COUNT, setting=VIRTUAL)
    if size is not None and layers:
        if layers % (pp * size):
            ledger.refuse(
                VIRTUAL_LAYERS, f"{layers} layers / (pp {pp} x {size}) is no whole number"
            )
        else:
            virtual, told_by = layers // (pp * size), VIRTUAL_LAYERS
            why = f"layers / (pp x layers of a virtual stage) = {layers} / ({pp} x {size})"
            ledger.set(VIRTUAL_LAYERS, VIRTUAL, virtual, why)
    if virtual > 1:
        why = "a rank with several stages interleaves them"
        ledger.set(told_by, SCHEDULE, "interleaved-1f1b", why)
    return virtual


def _read_group(ledger: Ledger, pp: int) -> None:
    size = ledger.whole(GROUP, COUNT)
    if size == pp:
        ledger.skip(GROUP, f"interleaved-1f1b has groups of pp = {pp} microbatches")
    elif size is not None:
        ledger.refuse(GROUP, f"groups are of pp = {pp} microbatches", works=(f"{GROUP} {pp}",))


def _read_stages(ledger: Ledger, layers: int | None, pp: int, virtual: int) -> None:
    """Map the layers of the first and the last stage, or what counts as one there; else even."""
    first, last = (ledger.whole(key, COUNT, setting=STAGES) for key in ENDS)
    counted = [bool(ledger.flag(key, setting=STAGES)) for key in ACCOUNTS]
    given = [key for key in ENDS if ledger.has(key)]
    told = [key for key, on in zip(ACCOUNTS, counted, strict=True) if on]
    if not layers or len(given) > sum(n is not None for n in (first, last)):
        return
    if not given and not told:
        if pp > 1:
            why = "layers are cut evenly"
            ledger.set(ENDS[0], STAGES, "even", why, source=ledger.default)
        return
    if given and told:
        ledger.refuse(told[0], f"{given[0]} says it already")
        return
    stages = pp * virtual
    if told:
        size, rest = divmod(layers + len(told), stages)
        if rest:
            ledger.refuse(
                told[0], f"{layers} layers + {len(told)} are no multiple of {stages} stages"
            )
            return
        sizes = [size] * stages
        sizes[0] -= counted[0]
        sizes[-1] -= counted[1]
        given = told
    else:
        # With virtual stages the two numbers are those of the first and the last rank's.
        middle, rest = pp - len(given), layers - (first or 0) - (last or 0)
        if virtual > 1:
            ledger.refuse(given[0], "the split over virtual stages is listed in pipeline.stages")
            return
        if middle <= 0 or rest <= 0 or rest % middle:
            ledger.refuse(given[-1], f"{rest} layers are left for {middle} stages between")
            return
        sizes = [n for n in (first, *[rest // middle] * middle, last) if n]
    _set_sizes(ledger, sizes, given)


def _set_sizes(ledger: Ledger, sizes: list[int], given: list[str]) -> None:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    stages = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    why = f"layers of each stage: {', '.join(map(str, sizes))}"
    ledger.set(given[-1], STAGES, stages, why, source=ledger.where(*given))
    for key in given[:-1]:
        ledger.skip(key, f"together with {given[-1]}")
