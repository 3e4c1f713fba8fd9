# SPDX-License-Identifier: Apache-2.0
"""A whole run of the trainer for the prover, which imports no trainer and names these functions.

    write_data        (one rank) prepares documents as `echelon data prepare` does
    train             runs the real loop on every rank: the first plan to its end, with validation
                      and saves, then the second plan from the checkpoint in the middle
    train_and_resume  the same with one plan, overflows, several resumes, and a start from an export
    read_back         (one rank) reads the last checkpoint and continues prompts: over a cache, as
                      `echelon generate` does, and without a cache
    export            (one or two ranks) writes the last checkpoint in the formats of other tools,
                      and reads each folder as a run does that starts from it

Results are files in a folder of the prover: `run-N-rank-RRRR.json` of each run,
`read-back.safetensors` and `written.json`; `exported-N` and `imported-N.safetensors` of each
export.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file

from echelon.config.generation import Request, Sampling, generation_plan
from echelon.config.job import CheckpointSettings, DataSettings, Job, TrainSettings
from echelon.core.event import EventList, EventSink
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import base_shape, parameters, router_bias_name, router_biases
from echelon.core.piece_sizes import PROOF_PIECES
from echelon.core.plan import Plan
from echelon.core.serialize import to_json
from echelon.interop.hugging_face.adapters import ADAPTER_CONFIG, adapter_config
from echelon.interop.hugging_face.folder import hub_config
from echelon.launch.context import RankContext
from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.models.decoder import Decoder
from echelon.models.precision import TORCH_DTYPES, at_least_fp32
from echelon.parallel.fp8_linear import multiply_in_fp8
from echelon.parallel.storage.weights import Shard
from echelon.training.checkpoint.communicator import SingleRankCommunicator
from echelon.training.checkpoint.folder import checkpoint_path
from echelon.training.checkpoint.identity import RunIdentity
from echelon.training.checkpoint.index import PARAMETERS
from echelon.training.checkpoint.load import load_checkpoint
from echelon.training.data.dataset import TokenDataset, document_starts
from echelon.training.data.tokenizer import ByteTokenizer
from echelon.training.data.writer import DatasetWriter
from echelon.training.engine import TrainEngine
from echelon.training.inference import GenerateTask, generate_rank
from echelon.training.loop import RankTask, TrainLoop, digests
from echelon.training.observer import StepFacts
from echelon.training.steps.expert_balance import ROUTER_BIAS, whole_shards
from echelon.training.steps.fp8_scales import FP8_SCALES, Fp8Scales
from echelon.training.weights.adapters import find_adapters
from echelon.training.weights.files import find_weights
from echelon.training.weights.load import load_moments, load_weights
from echelon.training.weights.writers.task import (
    ExportTask,
    write_config,
    write_weights,
    writers_of,
)

_SHARD_TOKENS = 100
"""Tokens of a file of data: so few that a step reads from several."""
_FILE_BYTES = 20_000
"""Bytes of a file of exported weights, at most: so few that there are several."""
_GREEDY = 1e-6
"""A temperature at which the likeliest token is drawn."""
_FACTS = ("loss", "tokens", "grad_norm", "learning_rate", "loss_scale", "skipped")


def _in_small_pieces(context: RankContext) -> RankContext:
    """Return the context of a rank with small pieces, so that every loop has several."""
    return replace(context, pieces=PROOF_PIECES)


class WholeRunObserver:
    """Keep the loop's reports of steps, validations and checkpoints."""

    def __init__(self) -> None:
        self.events = EventList()
        self.reports: list[dict[str, Any]] = []

    def _report(self, kind: str, step: int, **values: Any) -> None:
        self.reports.append({"kind": kind, "step": step, **values})

    @property
    def sink(self) -> EventSink:
        """Where the events of this rank go."""
        return self.events

    def used_bytes(self) -> int:
        """Return 0: memory is not observed."""
        return 0

    def stepped(self, facts: StepFacts) -> None:
        """Keep the facts of a step."""
        self._report("step", facts.step, **{name: getattr(facts, name) for name in _FACTS})

    def validated(self, step: int, loss: float) -> None:
        """Keep a validation loss."""
        self._report("validation", step, loss=loss)

    def saved(self, step: int, path: Path) -> None:
        """Keep the path of a checkpoint."""
        self._report("saved", step, path=str(path))

    def noted(self, step: int, text: str) -> None:
        """Keep a note."""
        self._report("note", step, text=text)

    def speaks(self, now: bool) -> None:
        """Do nothing: every rank keeps its reports."""

    def close(self) -> None:
        """Do nothing: the caller writes the reports."""


class StateObserver(WholeRunObserver):
    """Keep the state of an engine where a run begins and is saved, and make steps overflow."""

    def __init__(self, overflows: Sequence[int] = ()) -> None:
        """Put an infinite number into a gradient of these steps, counted from 0."""
        super().__init__()
        self._overflows, self._step = overflows, 0
        self._engine: TrainEngine | None = None

    def watch(self, engine: TrainEngine) -> None:
        """Observe this engine, before its first step."""
        self._engine = engine
        engine.on_gradients = self._overflow

    def stepped(self, facts: StepFacts) -> None:
        """Keep the facts of a step, and count it."""
        super().stepped(facts)
        self._step = facts.step

    def validated(self, step: int, loss: float) -> None:
        """Keep the state at the start, which is validated before its first step."""
        if not self.reports:
            self._step = step
            self._keep_state(step)
        super().validated(step, loss)

    def saved(self, step: int, path: Path) -> None:
        """Keep the state that was saved."""
        self._keep_state(step)

    def _keep_state(self, step: int) -> None:
        assert self._engine is not None, "it is watched"
        state = dict(_flat("", self._engine.position()))
        if (part := self._engine.parts.find(Fp8Scales)) is not None:
            state[f"{FP8_SCALES}.scales"] = part.scales.scales()
        for kind, shards in self._engine.checkpoint_state().items():
            named = {name: list(held) for name, held in shards.items()}
            state |= {f"{kind} {name}": value for name, value in digests(named).items()}
        self._report("state", step, state=state)

    def _overflow(self) -> None:
        """Put a number that is not finite into a gradient, on the ranks of the element.

        In turn: infinity at the start of the first trained parameter, NaN at the end of the last
        parameter, minus infinity at the end of a parameter between. So different stages and tensor
        ranks overflow.
        """
        assert self._engine is not None, "it is watched"
        if self._step not in self._overflows:
            return
        names = [spec.name for spec in parameters(self._engine.plan.model) if not spec.frozen]
        number = self._overflows.index(self._step)
        place = (0, -1, len(names) // 2)[number % 3]
        for shard in self._engine.gradients().get(names[place], ()):
            shape, whole = shard.tensor.shape, shard.global_shape
            ends = all(
                offset + size == length
                for offset, size, length in zip(shard.offset, shape, whole, strict=True)
            )
            if shard.tensor.numel() and (ends if place else not any(shard.offset)):
                element = (-1 if place else 0,) * shard.tensor.dim()
                shard.tensor[element] = (torch.inf, torch.nan, -torch.inf)[number % 3]


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested objects under dotted names."""
    if not isinstance(value, dict):
        yield name, value
        return
    for key, inner in cast("dict[str, Any]", value).items():
        yield from _flat(f"{name}.{key}" if name else key, inner)


def write_data(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Write the documents of `argument` (`texts`) to `folder`/data, one after the other."""
    encoder = ByteTokenizer()
    target = Path(argument["folder"]) / "data"
    with DatasetWriter(target, encoder, shard_tokens=_SHARD_TOKENS) as writer:
        for text in argument["texts"]:
            (tokens,) = encoder.encode_chunks([text.encode()])
            writer.add(tokens, ends_document=True)
        writer.commit()


def train(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Train `plans[0]`, then go on with `plans[1]` from the checkpoint after `saved_after` steps.

    `argument` also holds `folder`, `num_steps`, `validation_fraction` and `validation_batches`.
    """
    first, second = (_job(Plan.from_json(text), argument) for text in argument["plans"])
    folder = Path(argument["folder"])
    _run(context, folder, 0, first, resume=None)
    middle = checkpoint_path(folder / "run-0" / "checkpoints", argument["saved_after"])
    _run(context, folder, 1, second, resume=str(middle))


def train_and_resume(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Train `plan` to its end, and again from the checkpoint after each of `saved_after` steps.

    Where `exported` is a dtype, the last run starts from the weights of the last checkpoint in it.
    A gradient of each step in `overflows` has a number that is not finite. `run-N-rank-RRRR.json`
    also has the state of the engine at each checkpoint and at the start of a run: hashes of its
    tensors, and its position.
    """
    plan, folder = Plan.from_json(argument["plan"]), Path(argument["folder"])
    job = _job(plan, {**argument, "saved_after": 1})
    overflows = argument["overflows"]
    _run(context, folder, 0, job, resume=None, observer=StateObserver(overflows))
    for number, step in enumerate(argument["saved_after"], start=1):
        saved = checkpoint_path(folder / "run-0" / "checkpoints", step)
        observer = StateObserver(overflows)
        _run(context, folder, number, job, resume=str(saved), observer=observer)
    if argument["exported"] is None:
        return
    weights, writers = folder / "weights", writers_of(context, 1)
    writers.on_first(weights.mkdir)
    task = ExportTask(
        checkpoint=str(checkpoint_path(folder / "run-0" / "checkpoints", argument["num_steps"])),
        folder=str(weights),
        to="echelon",
        shape=plan.model,
        dtype=argument["exported"],
        model_type=None,
        file_bytes=_FILE_BYTES,
        threads=1,
        tp=1,
        pp=1,
        adapters=False,
        sizes=PROOF_PIECES,
    )
    write_weights(task, writers)
    start = replace(job, train=replace(job.train, steps=1, weights=str(weights)))
    number = 1 + len(argument["saved_after"])
    _run(context, folder, number, start, resume=None, observer=StateObserver())


def read_back(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Read the last checkpoint on one device, and write `count` tokens after each of `prompts`.

    Over a cache a text ends with its document, and has no more tokens than the model has positions.
    A model that looks ahead has no cache.
    """
    folder, plan = Path(argument["folder"]), Plan.from_json(argument["plans"][1])
    index = TokenDataset.open(folder / "data").index
    last = checkpoint_path(folder / "run-1" / "checkpoints", argument["num_steps"])
    decoder = load_decoder(plan, last, index.tokenizer.hash)
    weights = {name: value.detach().clone() for name, value in decoder.named_parameters()}
    save_file(weights, folder / "read-back.safetensors")
    end, prompts, count = index.tokenizer.end_of_document, argument["prompts"], argument["count"]
    separator = end if plan.mathematics.documents == "separate" else None
    written = {
        "without a cache": [
            continue_tokens(decoder, prompt, count, temperature=_GREEDY, separator=separator)
            for prompt in prompts
        ]
    }
    if plan.model.causal and max(map(len, prompts)) + count <= plan.model.max_positions:
        task = GenerateTask(
            plan=generation_plan(plan, ()),
            trained=plan,
            checkpoint=str(last),
            tokenizer_hash=index.tokenizer.hash,
            prompts=tuple(map(tuple, prompts)),
            request=Request(max_tokens=count, sampling=Sampling(temperature=0.0)),
            end=end,
            separator=separator,
        )
        writing = generate_rank(_in_small_pieces(context), to_json(task))
        written["over a cache"] = list(map(list, writing.written))
    (folder / "written.json").write_text(json.dumps(written), encoding="utf-8")


def export(context: RankContext, argument: Mapping[str, Any]) -> None:
    """Write the last checkpoint to `exported-N` for each of `exports`, and read it from there.

    An export is the format, `model_type`, dtype and ranks of a folder, with adapters alone or
    merged. Files, and rows that take adapters at once, are so small that tensors are cut: see
    `_FILE_BYTES` and `PROOF_PIECES`. All ranks write; the first rank reads.
    """
    folder, plan = Path(argument["folder"]), Plan.from_json(argument["plans"][1])
    last = checkpoint_path(folder / "run-1" / "checkpoints", argument["num_steps"])
    writers = writers_of(context, 1)
    for number, chosen in enumerate(argument["exports"]):
        target = folder / f"exported-{number}"
        writers.on_first(target.mkdir)
        task = ExportTask(
            checkpoint=str(last),
            folder=str(target),
            shape=plan.model,
            file_bytes=_FILE_BYTES,
            threads=1,
            sizes=PROOF_PIECES,
            **chosen,
        )
        write_weights(task, writers)
        if context.rank == 0:
            imported = _import(task, plan.model)
            save_file(imported, folder / f"imported-{number}.safetensors")


def _import(task: ExportTask, model: ModelShape) -> dict[str, torch.Tensor]:
    """Return the weights and moments that a run reads from a folder, in pieces as of ranks.

    The key of a moment is its kind and the name of its weight.
    """
    folder, base, exchange = Path(task.folder), base_shape(model), SingleRankCommunicator()
    specs = {spec.name: spec for spec in (*parameters(model), *router_biases(base))}
    if task.adapters:
        text = adapter_config(model, hub_config(base).architecture)
        (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
        files = find_adapters(folder, model)
    else:
        write_config(task, {})
        files = find_weights(folder, base)
    values = {
        kind: {name: torch.zeros(specs[name].shape, dtype=torch.float64) for name in places}
        for kind, places in {"": files.sources, **files.moments}.items()
    }
    cut = {kind: _in_pieces(of_kind) for kind, of_kind in values.items()}
    load_weights(files, cut.pop(""), exchange, PROOF_PIECES)
    load_moments(files, cut, exchange, PROOF_PIECES)
    return {
        f"{kind} {name}".strip(): value
        for kind, of_kind in values.items()
        for name, value in of_kind.items()
    }


def _in_pieces(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Shard]]:
    """Return views of tensors that are cut along every dim, as shards of ranks."""
    shards: dict[str, list[Shard]] = {}
    for name, tensor in tensors.items():
        cuts = [(slice(0, size // 3), slice(size // 3, size)) for size in tensor.shape]
        shards[name] = [
            Shard(
                name=name,
                global_shape=tuple(tensor.shape),
                offset=tuple(part.start for part in place),
                tensor=tensor[place],
                primary=True,
            )
            for place in product(*cuts)
        ]
    return shards


def _job(plan: Plan, argument: Mapping[str, Any]) -> Job:
    return Job(
        plan=plan,
        data=DataSettings(validation_fraction=argument["validation_fraction"]),
        train=TrainSettings(
            steps=argument["num_steps"],
            run_name="whole",
            validate_every=argument["num_steps"],
            validation_batches=argument["validation_batches"],
        ),
        checkpoint=CheckpointSettings(every=argument["saved_after"], keep="all"),
    )


def _run(
    context: RankContext,
    folder: Path,
    number: int,
    job: Job,
    *,
    resume: str | None,
    observer: StateObserver | None = None,
) -> None:
    reporter = observer or WholeRunObserver()
    task = RankTask(
        job=job,
        run_dir=str(folder / f"run-{number}"),
        data=str(folder / "data"),
        observer=f"{__name__}:{WholeRunObserver.__name__}",
        resume=resume,
    )
    loop = TrainLoop(_in_small_pieces(context), task, reporter)
    if observer is not None:
        observer.watch(loop.engine)
    try:
        loop.run()
        loop.engine.model.gathering.settle()
    finally:
        # A run that an error ends also reports its steps.
        path = folder / f"run-{number}-rank-{context.rank:04d}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(reporter.reports), encoding="utf-8")
        part.rename(path)
        loop.engine.close()


@torch.no_grad()
def continue_tokens(
    decoder: Decoder,
    tokens: list[int],
    count: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
    separator: int | None = None,
) -> list[int]:
    """Return `count` token ids that continue `tokens`, sampled at `temperature`.

    The whole context is run again for each token: right for a few hundred tokens of a small model.
    One that was trained on separate documents does not look beyond the last `separator`. Experts
    are chosen as the decoder's `operations.routing` says.
    """
    generator = torch.Generator().manual_seed(seed)
    written = list(tokens)
    for _ in range(count):
        recent = written[-decoder.shape.max_positions :]
        context = torch.tensor(recent)
        whole = TokenBatch.from_rows(
            context[None],
            torch.full_like(context, IGNORED_LABEL)[None],
            torch.zeros(1, dtype=torch.int64),
            train=False,
        )
        joined = separator is None
        documents = None if joined else document_starts(np.array([recent]), separator)
        batch = whole.cut((), documents)
        x_ND = decoder.norm(decoder.hidden(None, batch)[-1:])
        logits_V = decoder.logits(x_ND)[0]
        weights_V = (logits_V / temperature).softmax(-1)
        written.append(int(torch.multinomial(weights_V, 1, generator=generator)))
    return written[len(tokens) :]


def load_decoder(plan: Plan, checkpoint: Path, tokenizer_hash: str) -> Decoder:
    """Return the whole model on one device with the weights of a checkpoint of `plan`.

    They are the master copies, in their dtype. Where linear layers were trained to multiply 8-bit
    numbers, they do.

    Of experts, the biases of their routers too: tokens are routed as they were trained to be. But
    nothing is dropped: the room of an expert is counted by sequence, and a text that has just begun
    would have hardly any.
    """
    decoder = Decoder(plan.model).to(TORCH_DTYPES[plan.mathematics.precision.master])
    if plan.mathematics.precision.is_fp8:
        multiply_in_fp8(decoder, plan.mathematics.precision.fp8_block)
    wide = at_least_fp32(TORCH_DTYPES[plan.mathematics.precision.parameters])
    biases = {spec.name: torch.zeros(spec.shape, dtype=wide) for spec in router_biases(plan.model)}
    with torch.no_grad():
        load_checkpoint(
            checkpoint,
            wanted={
                PARAMETERS: whole_shards(
                    {name: weight.data for name, weight in decoder.named_parameters()}
                ),
                ROUTER_BIAS: whole_shards(biases),
            },
            identity=RunIdentity.from_plan(plan, tokenizer_hash),
            exchange=SingleRankCommunicator(),
            pieces=PROOF_PIECES,
        )
    routing = decoder.operations.routing
    routing.balance = replace(plan.mathematics.balance, capacity_factor=None)
    routing.biases = {
        layer: biases[router_bias_name(layer)]
        for layer in range(plan.model.layers)
        if router_bias_name(layer) in biases
    }
    return decoder
