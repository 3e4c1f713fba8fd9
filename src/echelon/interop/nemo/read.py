# SPDX-License-Identifier: Apache-2.0
"""A YAML of NeMo's Megatron models -> settings, by the flags of Megatron-LM. NeMo 1, and NeMo 2's.

https://github.com/NVIDIA/NeMo: examples/nlp/language_modeling/conf. Its model, optimizer and mesh
are Megatron-Core's, so what its keys mean is said once, in `megatron/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

from echelon.interop.abilities import tool_tables
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import KeyReader, Refusal, json_text
from echelon.interop.megatron.read import read_keys as read_megatron

TABLES = tool_tables("nemo")
_PRECISION = {
    "bf16": "--bf16",
    "bf16-mixed": "--bf16",
    "16": "--fp16",
    "16-mixed": "--fp16",
    "32": "",
    "32-true": "",
}
_NORMS: Mapping[str, tuple[str, object]] = {
    "rmsnorm": ("--normalization", "RMSNorm"),
    "layernorm": ("--normalization", "LayerNorm"),
    "layernorm1p": ("--apply-layernorm-1p", True),
}
_ACTIVATIONS: Mapping[str, tuple[str, object]] = {
    "swiglu": ("--swiglu", True),
    "fast-swiglu": ("--swiglu", True),
    "gelu": ("", True),
    "squared-relu": ("--squared-relu", True),
    "geglu": ("--quick-geglu", True),
    "fast-geglu": ("--quick-geglu", True),
}
_OPTIMIZERS = {
    "mcore_distributed_optim": True,
    "distributed_fused_adam": True,
    "megatron_fused_adam": False,
    "fused_adam": False,
    "adamw": False,
}
"""Optimizers that are AdamW, and whether they are shared out."""
_BETAS = ("--adam-beta1", "--adam-beta2")
_SCHEDULES = {"CosineAnnealing": "cosine", "WarmupHoldPolicy": "constant"}

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_WHOLE = re.compile(r"-?\d{1,15}")
_SUMS: Mapping[str, Callable[[int, int], int]] = {
    "multiply": lambda a, b: a * b,
    "divide_floor": lambda a, b: a // b if b else 0,
}
_DEPTH = 8
"""References of references."""

_FLAG = re.compile(r"--[a-z][\w-]*")


def read_keys(reader: KeyReader, context: ImportContext) -> None:
    """Note in `reader` what becomes of every key of a YAML of NeMo."""
    reader.given = fill_references(
        {key.removeprefix("training."): value for key, value in reader.given.items()}
    )
    flags: dict[str, object] = {}
    origins: dict[str, str] = {}
    for key, flag, value in (*_plain_flags(reader), *_other_flags(reader)):
        if flag and flag not in flags:
            flags[flag], origins[flag] = value, key
    names = {flag: key for key, flag in TABLES.flags.items()}
    translation = Translation(flags=flags, origins=origins, names=names)
    read_translated(reader, translation, read_megatron, context)
    reader.finish(TABLES.keys, "rest")


def _plain_flags(reader: KeyReader) -> Iterator[tuple[str, str, object]]:
    """Yield keys that are flags as they are: false, like null, is none."""
    for key, flag in TABLES.flags.items():
        if reader.has(key):
            if reader.given[key] is False:
                reader.skip(key, "off")
            else:
                yield key, flag, reader.given[key]


def _other_flags(reader: KeyReader) -> Iterator[tuple[str, str, object]]:
    """Yield keys whose values are flags."""
    key = "trainer.precision"
    if isinstance(number := reader.given.get(key), int):
        reader.given = {**reader.given, key: str(number)}
    if (word := reader.word(key, _PRECISION, setting="precision.parameters")) is not None:
        yield key, _PRECISION[word], True
        reader.skip(key, "dtype of parameters")
    for key, words, setting in (
        ("model.normalization", _NORMS, "model.norm"),
        ("model.activation", _ACTIVATIONS, "model.activation"),
    ):
        if (word := reader.word(key, words, setting=setting)) is not None:
            flag, value = words[word]
            yield key, flag, value
            reader.skip(key, "as Megatron-LM has it")
    key = "model.num_query_groups"
    if reader.has(key):
        yield key, "--group-query-attention", True
        yield key, "--num-query-groups", reader.given[key]
    for key, flag in (
        ("model.bias", "--disable-bias-linear"),
        ("model.share_embeddings_and_output_weights", "--untie-embeddings-and-output-weights"),
    ):
        if reader.flag(key) is False:
            yield key, flag, True
        reader.skip(key, "as Megatron-LM has it")
    yield from _optimizer_flags(reader)
    yield from _vocabulary(reader)


def _optimizer_flags(reader: KeyReader) -> Iterator[tuple[str, str, object]]:
    key = "model.optim.name"
    if (word := reader.word(key, _OPTIMIZERS, setting="optimizer.kind")) is not None:
        if _OPTIMIZERS[word]:
            yield key, "--use-distributed-optimizer", True
        reader.skip(key, "AdamW")
    key, betas = "model.optim.betas", reader.given.get("model.optim.betas")
    if reader.has(key) and isinstance(betas, list):
        for flag, value in zip(_BETAS, cast("list[object]", betas), strict=False):
            yield key, flag, value
    key = "model.optim.sched.name"
    if (word := reader.word(key, _SCHEDULES, setting="optimizer.schedule")) is not None:
        yield key, "--lr-decay-style", _SCHEDULES[word]


def _vocabulary(reader: KeyReader) -> Iterator[tuple[str, str, object]]:
    key = "model.tokenizer.type"
    if reader.has(key) and "model.override_vocab_size" not in reader.given:
        size = TABLES.vocab.get(str(reader.given[key]))
        if size is not None:
            reader.assume(f"{size} token ids, those of {reader.given[key]}")
            yield key, "--vocab-size", size


def fill_references(given: Mapping[str, object]) -> dict[str, object]:
    """Return the keys with what their references mean; what is not in the file stays as it is."""
    return {
        key: _fill(key, value, given) if isinstance(value, str) else value
        for key, value in given.items()
    }


def _fill(key: str, text: str, given: Mapping[str, object]) -> object:
    for _ in range(_DEPTH):
        match = _INNERMOST.search(text)
        if match is None:
            break
        value = _value(key, match[1], given)
        if value is None or (match[0] == text and not isinstance(value, str)):
            return text if value is None else value
        text = text[: match.start()] + str(value) + text[match.end() :]
    return text


def _value(key: str, inner: str, given: Mapping[str, object]) -> object:
    name, colon, arguments = inner.partition(":")
    if colon:
        words = [word.strip() for word in arguments.split(",")]
        if name not in _SUMS or len(words) != 2 or not all(map(_WHOLE.fullmatch, words)):
            return None
        return _SUMS[name](int(words[0]), int(words[1]))
    if name.startswith("."):
        table = key.rpartition(".")[0]
        return given.get(f"{table}{name}")
    return given.get(name, given.get(name.removeprefix("training.")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Hold flags of the other tool, and of each flag the key that it comes from.

    `names` are the keys of flags that the file does not have, so that its defaults have a name too.
    """

    flags: Mapping[str, object]
    origins: Mapping[str, str]
    names: Mapping[str, str]

    def name(self, flag: str) -> str:
        """Return the key of a flag; the flag itself where it has none."""
        return self.origins.get(flag) or self.names.get(flag) or flag

    def text(self, text: str) -> str:
        """Return a text with keys for flags."""
        return _FLAG.sub(lambda match: self.name(match[0]), text)


def read_translated(
    reader: KeyReader,
    translation: Translation,
    read_keys: Callable[[KeyReader, ImportContext], None],
    context: ImportContext,
) -> None:
    """Note in `reader` what becomes of its keys when the other tool reads them as its flags."""
    other = KeyReader(tool=reader.tool, path=reader.path, given=translation.flags)
    read_keys(other, context)
    for setting, entry in other.entries.items():
        reader.entries[setting] = replace(entry, source=translation.text(entry.source))
    for row in other.rows:
        key = translation.name(row.key)
        given = json_text(reader.given[key]) if key in reader.given else row.given
        why = translation.text(row.why)
        reader.rows.append(replace(row, key=key, given=given, why=why))
    for refusal in other.refusals:
        problem = replace(
            refusal.problem,
            message=translation.text(refusal.problem.message),
            key=translation.text(refusal.problem.key),
            set_by=translation.text(refusal.problem.set_by),
            suggestions=tuple(map(translation.text, refusal.problem.suggestions)),
        )
        keys = tuple(map(translation.name, refusal.keys))
        reader.refusals.append(Refusal(keys=keys, problem=problem))
    reader.assumptions.extend(map(translation.text, other.assumptions))
    reader.known.update(dict.fromkeys(translation.origins.values()))
