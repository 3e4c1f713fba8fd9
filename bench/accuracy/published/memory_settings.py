"""What a row says of its device's memory: states and dtypes, offload, and how it was read.

Columns first (`bench/data/README.md` describes them), else words of the columns that every file
has: `framework`, `precision`, `compile_fusion_notes`, `zero_stage`. A cell with a word that is not
known refuses its row; a note that says nothing of memory is no error.

An optimizer keeps so many values of each weight: Adam two moments, SGD, Lion and Muon one,
Adafactor a row and a column. In 8 bits they come with a scale in fp32 for each 256 values
(bitsandbytes functional.py, torchao optim/subclass_8bit.py), in 4 bits for each 128.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from bench.accuracy.published.rows import Refused, Row
from echelon.core.rulebook.config import OUT_OF_RANGE
from echelon.cost.inputs.cost_inputs import TrainerConstants

MEMORY_KINDS = ("allocated", "reserved", "driver")
"""What a number of memory can be: torch's two peaks, or all that a device has in use."""
FULL_BYTES = 4.0
"""Bytes of a value in fp32."""
VALUE_BYTES: Mapping[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "int8": 1.0 + 4.0 / 256.0,
    "fp8": 1.0 + 4.0 / 256.0,
    "int4": 0.5 + 4.0 / 128.0,
}
"""Bytes of a value of optimizer state, with its share of a scale."""
MOMENTS: tuple[tuple[str, float], ...] = (
    ("adafactor", 0.01),
    ("came", 0.01),
    ("adam", 2.0),
    ("lamb", 2.0),
    ("muon", 1.0),
    ("lion", 1.0),
    ("momentum", 1.0),
    ("sgd", 1.0),
)
"""Values that an optimizer keeps of a weight, by what is in its name, the most telling first."""
USUAL_KIND: tuple[tuple[str, str], ...] = (
    ("torchtitan", "reserved"),
    ("swift", "reserved"),
    ("foundry", "reserved"),
    ("megatron-deepspeed", "driver"),
    ("internevo", "driver"),
    ("oneflow", "driver"),
    ("torchtune", "allocated"),
    ("bridge", "allocated"),
    ("nemo", "allocated"),
    ("megatron-lm", "allocated"),
    ("nanotron", "allocated"),
    ("paddlenlp", "allocated"),
    ("litgpt", "allocated"),
    ("thunder", "allocated"),
)
"""What a trainer prints as its memory: `torch.cuda.max_memory_reserved` of torchtitan's metrics and
of ms-swift, `max_memory_allocated` of the others; users of older trainers read the driver's."""
KIND_WORDS: tuple[tuple[str, str], ...] = (
    (r"max[_ -]?reserved|max_memory_reserved|\breserved\b", "reserved"),
    (r"max_memory_allocated|mem-max-allocated|peak[_ -]allocated", "allocated"),
    (r"\ballocated\b|peak of active", "allocated"),
    (r"nvidia-smi|rocm-smi|monitor-gpu|\bdriver\b(?! \d)", "driver"),
    (r"memory in use|memory of the device|cuda context", "driver"),
)
"""Words of a note that say how memory was read."""
KEEPS_COPY = r"deepspeed|zero|colossal|llm\.?q"
"""Trainers that keep a copy of weights for the update though it is as narrow as they are."""
LISTS_SINCE = 2023
"""The year of PyTorch 2.0, whose optimizers update all weights of a device at once."""
FP8_COPIES = 2.0
"""Bytes of both fp8 copies of a weight, by rows and by columns, that Transformer Engine keeps
beside it in 16 bits (pytorch/module/base.py, get_weight_workspace)."""


def memory_kind(row: Row) -> str:
    """Return whether a row's memory is allocated, reserved or the driver's."""
    word = row.word("mem_kind").lower()
    if word:
        if word not in MEMORY_KINDS:
            raise Refused(OUT_OF_RANGE, f"mem_kind = {word} is none of {', '.join(MEMORY_KINDS)}")
        return word
    notes = f"{row.word('compile_fusion_notes')} {row.word('notes')}".lower()
    for words, kind in KIND_WORDS:
        if re.search(words, notes):
            return kind
    name = row.word("framework").lower()
    usual = next((kind for key, kind in USUAL_KIND if key in name), "reserved")
    if row.positive("mem_per_gpu_gb"):
        row.say("mem_kind", usual, "what its trainer prints, else what an allocator reserves")
    return usual


def drops_out(row: Row) -> bool:
    """Return whether a row of Megatron-Core keeps masks of dropout.

    `--hidden-dropout` is 0.1 where nobody says (megatron/training/arguments.py), which models like
    GPT leave and others do not.
    """
    found = re.search(r"dropout (?:of )?(\d*\.?\d+)|(no|without) dropout", words_of(row))
    if found:
        return bool(found[1]) and float(found[1]) > 0.0
    plain = "megatron-lm" in row.word("framework").lower()
    return plain and row.word("model").lower().startswith("gpt") and row.flag("gated_mlp") is False


def words_of(row: Row) -> str:
    """Return all that a row says in words about how it ran."""
    columns = ("framework", "precision", "zero_stage", "compile_fusion_notes", "notes")
    return "; ".join(row.word(column) for column in columns).lower()


def offloaded(row: Row, column: str) -> bool:
    """Return whether the host's memory holds the optimizer's state, or parameters."""
    cell = row.word(column).lower()
    if cell:
        if cell in ("none", "no", "false", "0"):
            return False
        if re.match(r"host|cpu|nvme|yes|true|all|\d", cell):
            return True
        raise Refused(OUT_OF_RANGE, f"{column} = {cell} is neither none nor host")
    text = words_of(row)
    both = re.search(r"(?<!no )(?<!without )(?:cpu|host)[- ]offload|zero-?offload", text)
    if column == "parameter_offload":
        # FSDP's offload to the host is of all that it cuts, and so is that of ZeRO 3.
        said = re.search(r"param\w*[^,;.]{0,30} offload|offload[^,;.]{0,20} param", text)
        return said is not None or (both is not None and _cuts_parameters(row, text))
    state = re.search(r"optimi[sz]er[^,;.]{0,20} offload|offload[^,;.]{0,20} optimi[sz]er", text)
    paged = re.search(r"\bpaged\b", text)
    return "offload" in row.word("framework").lower() or any((both, state, paged))


def _cuts_parameters(row: Row, text: str) -> bool:
    return "fsdp" in text or "zero-3" in text or row.word("zero_stage").startswith("3")


def is_compiled(row: Row) -> bool | None:
    """Return whether a compiler made a row's kernels; None where the row does not say."""
    cell, notes = row.flag("compiled"), row.word("compile_fusion_notes").lower()
    if "thunder" in row.word("framework").lower() and "torch.compile" not in notes:
        # Thunder keeps what a model as it is written keeps.
        return False
    if cell is not None:
        return cell
    if re.search(r"\bno (?:torch[. _])?compile|without (?:torch[. _])?compile|\beager\b", notes):
        return False
    return True if re.search(r"torch[. _]compile|\bcompiled", notes) else None


def with_states(row: Row, software: TrainerConstants) -> TrainerConstants:
    """Return the constants of a row's trainer with the memory that its dtypes take."""
    return _with_optimizer(row, _with_parameters(row, software))


def _with_parameters(row: Row, software: TrainerConstants) -> TrainerConstants:
    """Return the constants with what parameters and gradients rest in."""
    half = float(software.element_bytes)
    if is_pure(row):
        states = replace(software, parameter_bytes=half, gradient_bytes=half, reduced_bytes=half)
        # FSDP sends gradients in the dtype in which they are.
        gathered = np.where(np.asarray(software.gathered_bytes) > 0, 4.0 * half, 0.0)
        return replace(states, state_bytes=2.0 * half, gathered_bytes=float(gathered))
    precision = row.word("precision").lower()
    if half < FULL_BYTES and re.search(r"autocast|\bamp\b(?!_)", precision):
        # Casts of weights are kept for backward until autocast ends.
        return replace(
            software,
            parameter_bytes=FULL_BYTES,
            gradient_bytes=FULL_BYTES,
            state_bytes=2.0 * FULL_BYTES,
            cast_bytes=half,
        )
    return software


def is_pure(row: Row) -> bool:
    """Return whether parameters, gradients and states are all in 16 bits."""
    text = row.word("precision").lower()
    if "bf16_master_weights" in text:
        return True
    if re.search(r"autocast|\bamp\b", text):
        return False
    if re.search(r"\bpure[ -](?:bf16|fp16|half)|(?:bf16|fp16)[ -(]*pure|all[ -]bf16", text):
        return True
    master = row.word("master_dtype").lower()
    states = row.word("state_dtype").lower()
    return master in ("none", "bf16") and states in ("bf16", "fp16", "int8", "int4")


def _with_optimizer(row: Row, software: TrainerConstants) -> TrainerConstants:
    text = words_of(row)
    name = (row.word("optimizer") or "").lower()
    said = row.word("state_dtype").lower()
    if not said:
        precision = row.word("precision").lower()
        named = re.search(r"(bf16|fp32|fp16) (?:optimi[sz]er )?(?:states|moments)", precision)
        said = _narrow_in_words(name) or _narrow_in_words(text) or (named[1] if named else "")
    master = row.word("master_dtype").lower()
    if not (name or said or master):
        return software
    moments = _moments(row, name)
    copy = _master_bytes(row, master, software)
    if said and said not in VALUE_BYTES:
        raise Refused(OUT_OF_RANGE, f"state_dtype = {said} is none of {', '.join(VALUE_BYTES)}")
    each = VALUE_BYTES[said] if said else _usual_moment(software, copy)
    widest = max(float(software.parameter_bytes), float(software.element_bytes))
    rests_wide = widest >= FULL_BYTES
    state = moments * each + (0.0 if rests_wide else copy)
    return replace(software, state_bytes=state)


def updates_in_lists(row: Row) -> bool:
    """Return whether an update makes a copy of a moment of all weights at once.

    Adam does so where it is not fused (torch/optim/adam.py, _multi_tensor_adam), and its states are
    not in 8 bits.
    """
    name = f"{row.word('optimizer')} {row.word('state_dtype')}".lower()
    adam = "adam" in (row.word("optimizer").lower() or "adam") and not re.search(r"8|4|page", name)
    late = (row.number("year") or 0.0) >= LISTS_SINCE
    return adam and late and "fused" not in words_of(row)


def reduces_copies(row: Row) -> bool:
    """Return whether PyTorch's DDP holds gradients once more, in the buckets that it sends."""
    return re.search(r"\bddp\b", row.word("framework").lower()) is not None


def keeps_on_host(row: Row) -> bool:
    """Return whether what blocks keep for backward waits in the host's memory."""
    words = r"activations? offload(?:ed)?\b|activations? (?:\w+ )?(?:in|on|to) (?:the )?host"
    layers = r"inputs of the checkpointed layers in (?:pinned )?host"
    return re.search(f"{words}|{layers}", words_of(row)) is not None


def frees_gradients(row: Row) -> bool:
    """Return whether each gradient is gone before the next is made."""
    words = r"fused into (?:the )?backward|(?:optimi[sz]er|step) in (?:the )?backward"
    return re.search(words + r"|as they are made and fr", words_of(row)) is not None


def _usual_moment(software: TrainerConstants, copy: float) -> float:
    whole = float(software.state_bytes)
    return 4.0 if whole >= 8.0 or copy else whole / 2.0


def _narrow_in_words(text: str) -> str:
    """Return the dtype of states of less than 16 bits that a text tells."""
    eight = r"(?:8[- ]?bit|int8)[ -]*(?:paged[ -]*)?(?:adam|optim|lion|state)"
    if re.search(eight + r"|(?:adamw?|optim\w*)[ -]?8[- ]?bit|\+ 8-?bit", text):
        return "int8"
    return "int4" if re.search(r"4[- ]?bit[ -]*(?:adam|optim)|adamw?[ -]?4[- ]?bit", text) else ""


def _moments(row: Row, name: str) -> float:
    if not name:
        name = "adam"
    if "sgd" in name and "no momentum" in name:
        return 0.0
    for word, count in MOMENTS:
        if word in name:
            return count
    raise Refused(OUT_OF_RANGE, f"optimizer = {name}: how many values it keeps is not known")


def _master_bytes(row: Row, word: str, software: TrainerConstants) -> float:
    """Return the bytes of the copy of a weight that the optimizer updates."""
    if not word:
        return 4.0 if float(software.state_bytes) >= 12.0 else 0.0
    if word in ("none", "no"):
        return 0.0
    if word == "bf16" and is_pure(row) and not re.search(KEEPS_COPY, words_of(row)):
        # What is updated are the parameters.
        return 0.0
    if word not in ("fp32", "bf16", "fp16"):
        raise Refused(OUT_OF_RANGE, f"master_dtype = {word} is none of fp32, bf16, fp16, none")
    return VALUE_BYTES[word]
