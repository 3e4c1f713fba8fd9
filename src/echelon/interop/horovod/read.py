# SPDX-License-Identifier: Apache-2.0
"""A horovodrun command -> settings: ranks, batch, sums of gradients, the optimizer. Horovod 0.28.

Horovod averages the gradients of whole replicas; what else a run is, its script says. Of scripts
the flags are read that those of its examples have (`examples/pytorch`), with what they mean there:
the learning rate is multiplied by the ranks and the passes before each sum.

`-np`, `-H` and the like are the long flags that they stand for. Variables that Horovod reads may
stand in front (`HOROVOD_CYCLE_TIME=3 horovodrun ...`); words that are neither are refused, for they
would be another command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from echelon.core.choices.collective_algorithms import BACKEND, HIERARCHICAL
from echelon.core.errors import ConfigError
from echelon.interop.abilities import tool_tables
from echelon.interop.import_context import ImportContext
from echelon.interop.key_reader import COUNT, FROM_ZERO, NUMBER, POSITIVE, KeyReader
from echelon.interop.parsing import command_words, flag_value, syntax_problem
from echelon.interop.ranks import known_or_fewest_ranks, set_batch, set_data_mesh

TABLES = tool_tables("horovod")
RANKS, BATCH, PASSES = "--num-proc", "--batch-size", "--batches-per-allreduce"
HALF = "--fp16-allreduce"
FUSION, FUSION_BYTES = "--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD"
HIERARCHY, NO_HIERARCHY = "--hierarchical-allreduce", "--no-hierarchical-allreduce"
HIERARCHY_VARIABLE = "HOROVOD_HIERARCHICAL_ALLREDUCE"
MEBIBYTE = 2**20  # bytes
LARGEST_MB = 2**20  # mebibytes

LAUNCHERS = ("horovodrun", "mpirun")
SHORT: Mapping[str, str] = {
    "-np": "--num-proc",
    "-H": "--hosts",
    "-hostfile": "--hostfile",
    "-p": "--ssh-port",
    "-i": "--ssh-identity-file",
    "-prefix-timestamp": "--prefix-output-with-timestamp",
    "--min-num-proc": "--min-np",
    "--max-num-proc": "--max-np",
}
"""Other names of flags of the launcher."""
_ASSIGNMENT = re.compile(r"(HOROVOD_\w+)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"(.*/)?python[\d.]*")


def read_keys(reader: KeyReader, context: ImportContext) -> None:
    """Note in `reader` what becomes of every flag and variable of a horovodrun command."""
    ranks = _read_ranks(reader, context)
    passes = _read_batch(reader, ranks, context)
    _read_sums(reader, ranks)
    _read_optimizer(reader, ranks * passes)
    reader.take("--seed", "train.seed", FROM_ZERO, "of the first weights and the sample order")
    reader.take("--log-interval", "observe.log_every", COUNT, "steps between step lines")
    reader.finish(TABLES.keys, "launcher", "script")


def _read_ranks(reader: KeyReader, context: ImportContext) -> int:
    """Map how many processes there are, each a whole replica; return them."""
    count = reader.integer(RANKS, COUNT, setting="mesh")
    reader.set("(processes)", "zero.stage", 0, "whole replicas", source=reader.default)
    source = ""
    if count is not None:
        if context.ranks not in (None, count):
            both = f"{reader.where(RANKS)}, --ranks {context.ranks}"
            reader.conflict(f"{RANKS} {count}, but --ranks {context.ranks}", "mesh", both)
            return 1
        source = reader.where(RANKS)
        reader.take_part(RANKS, f"ranks: {count}")
        context = replace(context, ranks=count)
    data = known_or_fewest_ranks(reader, context)
    if data is None:
        return 1
    set_data_mesh(reader, 0, replace(data, source=source or data.source))
    return data.count


def _read_batch(reader: KeyReader, ranks: int, context: ImportContext) -> int:
    """Map what a process reads between two sums; return its backward passes."""
    size = reader.integer(BATCH, COUNT, setting="batch.microbatch_sequences")
    passes = reader.integer(PASSES, COUNT, setting="batch.global_sequences")
    keys = ("(batch)", BATCH, PASSES)
    set_batch(reader, keys, (None, size, passes), ranks, context.microbatch)
    if passes is not None:
        reader.take_part(
            PASSES, "backward passes of a rank before each sum: the global batch has them"
        )
    return passes or 1


def _read_sums(reader: KeyReader, ranks: int) -> None:
    """Map how gradients are summed: in which dtype, in which buckets, over which ways."""
    if reader.flag(HALF, setting="precision.reduction"):
        reader.set(HALF, "precision.reduction", "fp16", "dtype on the wire, and of the sums")
        why = "sums in fp16 need a loss scale, or small gradients are zero"
        reader.set(HALF, "precision.loss_scaling", "dynamic", why)
    elif reader.has(HALF):
        reader.skip(HALF, "gradients are summed in their own dtype")
    _read_buckets(reader, ranks)
    on = bool(reader.flag(HIERARCHY, setting="collectives.algorithm"))
    off = bool(reader.flag(NO_HIERARCHY, setting="collectives.algorithm"))
    if on and off:
        both = reader.where(HIERARCHY, NO_HIERARCHY)
        reader.conflict(f"{HIERARCHY} and {NO_HIERARCHY}", "collectives.algorithm", both)
        return
    variable = reader.integer(HIERARCHY_VARIABLE, setting="collectives.algorithm")
    key = HIERARCHY if on else NO_HIERARCHY if off else HIERARCHY_VARIABLE
    if not (on or off) and variable is None:
        return
    hierarchical = on or (not off and bool(variable))
    what = "inside of nodes, across them, inside again" if hierarchical else "the backend's own"
    reader.set(key, "collectives.algorithm", HIERARCHICAL if hierarchical else BACKEND, what)
    if key != HIERARCHY_VARIABLE:
        reader.skip(HIERARCHY_VARIABLE, f"{key} says it")


def _read_buckets(reader: KeyReader, ranks: int) -> None:
    """Map what is summed together; a threshold of 0 sums each parameter by itself."""
    megabytes = reader.integer(FUSION, setting="zero.bucket_bytes")
    size = reader.integer(FUSION_BYTES, setting="zero.bucket_bytes")
    key = FUSION if megabytes is not None else FUSION_BYTES
    if megabytes is not None and megabytes > LARGEST_MB:
        reader.refuse(FUSION, "more than any device has", setting="zero.bucket_bytes")
        return
    total = megabytes * MEBIBYTE if megabytes is not None else size
    if total is None:
        return
    if ranks == 1:
        reader.skip_all((FUSION, FUSION_BYTES), "one rank sums nothing")
        return
    why = "gradients that are summed together" if total else "each parameter is a bucket"
    reader.set(key, "zero.bucket_bytes", max(1, total), why)
    if key != FUSION_BYTES:
        reader.skip(FUSION_BYTES, f"{key} says it")


def _read_optimizer(reader: KeyReader, factor: int) -> None:
    """Map the optimizer of the examples, SGD with the rate that they multiply."""
    keys = ("--base-lr", "--lr")
    rates = [(key, reader.number(key, POSITIVE, setting="optimizer.learning_rate")) for key in keys]
    for key, rate in rates:
        if rate is not None:
            why = f"the examples multiply it by ranks x passes = {factor}"
            reader.set(key, "optimizer.learning_rate", rate * factor, why)
    momentum = reader.number("--momentum", NUMBER, setting="optimizer.momentum")
    if momentum is not None:
        reader.set("--momentum", "optimizer.kind", "sgd", "the examples' optimizer")
        reader.set("--momentum", "optimizer.momentum", momentum, "decay of the momentum")
        reader.set("--momentum", "optimizer.clip_norm", "none", "the examples clip nothing")
    decay = reader.number("--wd", NUMBER, setting="optimizer.weight_decay")
    if decay is not None:
        reader.set("--wd", "optimizer.weight_decay", decay, "added to gradients, as SGD has it")
        reader.set("--wd", "optimizer.decay", "all", "torch.optim.SGD decays every parameter")


def parse_horovod(path: Path, text: str) -> Mapping[str, object]:
    """Return the flags and variables of a command; ConfigError where it is none, or one is twice.

    A flag has its value, a list of values, or true.
    """
    words = command_words(path, text)
    script = next((n for n, word in enumerate(words) if word.endswith(".py")), len(words))
    found: dict[str, object] = {}
    for key, values in (*_launcher_flags(path, words[:script]), *_flags(path, words[script + 1 :])):
        if key in found:
            raise ConfigError(syntax_problem(path, f"has {key} twice"))
        found[key] = flag_value(values)
    if not found:
        raise ConfigError(syntax_problem(path, "holds no command with --flags"))
    return found


def _launcher_flags(path: Path, words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    start = next((n for n, word in enumerate(words) if word in LAUNCHERS), None)
    before = words if start is None else words[:start]
    rest = [] if start is None else [word for word in words[start + 1 :] if word != "-u"]
    for word in before:
        if match := _ASSIGNMENT.fullmatch(word):
            yield match[1], [match[2]]
        elif not _PYTHON.fullmatch(word) and word != "-u":
            raise ConfigError(syntax_problem(path, f"has {word!r}, where horovodrun is to stand"))
    yield from _flags(path, [word for word in rest if not _PYTHON.fullmatch(word)])


def _flags(path: Path, words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag and the words behind it."""
    flag, values = "", list[str]()
    for word in words:
        if word.startswith("-") and not _is_number(word) and len(word) > 1:
            if flag:
                yield flag, values
            name, equals, value = word.partition("=")
            long = name if not name.startswith("--") else f"--{name[2:].replace('_', '-')}"
            flag, values = SHORT.get(long, long), [value] if equals else []
        elif flag:
            values.append(word)
        else:
            raise ConfigError(syntax_problem(path, f"has {word!r} in front of every flag"))
    if flag:
        yield flag, values


def _is_number(word: str) -> bool:
    return isinstance(flag_value([word]), int | float)
