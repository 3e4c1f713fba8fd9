# SPDX-License-Identifier: Apache-2.0
"""Exports of trained weights: their logits in other libraries, and their imports.

The trainer writes its last checkpoint in every format that the model has, with small files, and
adapters merged a few rows at a time. transformers reads folders with its own names, and the
independent implementation all others (`proof/independent/layouts.py`); a row of text must give the
logits of the weights that one device has trained. Then each folder is read as by a run that starts
from it, and every tensor compared.

Shape suffixes: B sequences, T positions, V vocabulary, R rows, C columns.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from echelon.core.errors import ConfigError, first_line
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import (
    base_shape,
    is_adapter,
    parameters,
    router_bias_name,
    router_biases,
)
from echelon.core.plan import DType, Plan
from echelon.core.rulebook.prove import PROVE_TRAINER_EXPORT, PROVE_TRAINER_IMPORT
from echelon.interop.hugging_face.adapters import adapter_tensors
from echelon.interop.hugging_face.folder import folder_tensors, hub_config
from echelon.interop.weight_names.source import ParameterSource
from echelon.models.precision import TORCH_DTYPES
from echelon.proof.claims.checks import Check, exact_check, relative_error
from echelon.proof.claims.claims import ClaimResult, judged
from echelon.proof.evidence.evidence import FLOAT64_TOLERANCE
from echelon.proof.evidence.fits import EXPLAINED, FLOOR, fit_factor
from echelon.proof.independent.hugging_face.beside import merged, missing
from echelon.proof.independent.hugging_face.configuration import transformers_model
from echelon.proof.independent.hugging_face.folder import FolderModel
from echelon.proof.independent.layouts import LAYOUTS, joined_ranks
from echelon.proof.independent.sequence import SequenceRun
from echelon.proof.whole_run.one_device import OneDeviceRun, RunTexts, logits_of, text_run

_EXPORTED = "logits of exported weights, as other libraries read them"
_IMPORTED = "weights that a run reads from each export"
_OWN, _HUB = "echelon", "hf"
_UNIVERSAL = "deepspeed"
_ROUNDED = 1e-9
"""Allowed distance beyond the nearest number of a dtype, relative to it."""

_LOGITS = 64
"""Allowed error of logits over the allowed error of the rounded weights that give them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The format of a folder, the family whose names its tensors have, and their dtype."""

    to: str
    model_type: str | None = None
    dtype: DType = "fp64"
    tp: int = 1
    """Tensor ranks that files are of."""
    pp: int = 1
    """Stages that files are of."""
    adapters: bool = False
    """Whether it has adapters alone, as PEFT has them."""

    @property
    def name(self) -> str:
        """Its name in a table: ``dcp of llama in bf16``."""
        names = f" of {self.model_type}" * (self.model_type is not None)
        ranks = f" of tp{self.tp} x pp{self.pp}" * (self.tp * self.pp > 1)
        dtype = f" in {self.dtype}" * (self.dtype != "fp64")
        return "adapters of " * self.adapters + f"{self.to}{names}{ranks}{dtype}"


def has_own_layout(model: ModelShape) -> bool:
    """True if a family of transformers has another layout of this model's weights.

    It fuses or transposes them, has their rows in another order, or subtracts an offset.
    """
    base = base_shape(model)
    try:
        tensors = folder_tensors(base, hub_config(base).architecture)
    except ConfigError:
        return False
    return any(
        len(tensor.parts) > 1
        or source != ParameterSource(key=source.key, shape=source.shape, padded=source.padded)
        for tensor in tensors
        for _, source in tensor.parts
    )


def exports_of(plan: Plan, own: DType) -> tuple[Export, ...]:
    """Return the exports of a shrunk float64 plan; in its `own` dtype tensors are rounded."""
    base = base_shape(plan.model)
    exports = [
        Export(to=_OWN),
        *(Export(to=to) for to, layout in LAYOUTS.items() if layout.has(base)),
    ]
    if LAYOUTS["megatron"].has(base):
        # Two of each, where they divide.
        tp, pp = 2 - (base.kv_heads | base.ffn) % 2, 2 - base.layers % 2
        exports.append(Export(to="megatron-legacy", tp=tp, pp=pp))
    if not why_not_read(plan):
        hub = hub_config(base).model_type
        exports += [Export(to=to, model_type=hub) for to in (_HUB, "dcp")]
        # A universal folder has what an optimizer trains, and so no biases of routers.
        if not router_biases(base):
            exports.append(Export(to=_UNIVERSAL, model_type=hub, dtype="fp32"))
        if plan.model.lora is not None and _has_adapters_apart(plan.model):
            exports.append(Export(to=_HUB, model_type=hub, adapters=True))
    if own != "fp64":
        exports.append(replace(exports[0], dtype=own))
    return tuple(exports)


def _has_adapters_apart(model: ModelShape) -> bool:
    """True if each adapted layer is one of transformers, which has its matrix the same way round.

    Of PyTorch's linear layers PEFT merges by adapter_config.json alone.
    """
    architecture = hub_config(base_shape(model)).architecture
    tensors = folder_tensors(base_shape(model), architecture)
    try:
        adapter_tensors(model, architecture)
    except ConfigError:
        return False
    return not any(source.transposed for tensor in tensors for _, source in tensor.parts)


def why_not_read(plan: Plan) -> str:
    """The reason why transformers reads no export of a plan; empty if it does."""
    model = transformers_model(_as_read(plan))
    if reason := missing() or (model if isinstance(model, str) else ""):
        return reason
    try:
        hub_config(base_shape(plan.model))
    except ConfigError:
        return "no config.json says the model"
    return ""


def _as_read(plan: Plan) -> Plan:
    """Return the plan of a text that is read: one document, no dropout, room for every token."""
    mathematics = plan.mathematics
    balance = replace(mathematics.balance, capacity_factor=None)
    model = replace(base_shape(plan.model), dropout=0.0)
    mathematics = replace(mathematics, model=model, balance=balance, documents="joined")
    return replace(plan, mathematics=mathematics)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunExports:
    """The exports of a run in `folder`, and the same run on one device."""

    plan: Plan
    exports: Sequence[Export]
    folder: Path
    texts: RunTexts
    right: OneDeviceRun

    @property
    def base(self) -> ModelShape:
        """Return the model without adapters."""
        return base_shape(self.plan.model)

    @property
    def tokens(self) -> list[int]:
        """Return the text that is read."""
        return self.texts.training_tokens[: self.plan.mathematics.sequence_length]

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the trained weights, with what adapters add to them."""
        weights = self.right.weights
        return weights if self.plan.model.lora is None else merged(self.plan.model, weights)

    @property
    def biases(self) -> Mapping[int, torch.Tensor]:
        """Return the biases of routers, by block."""
        return self.right.steps[-1].state_after.biases

    def forward(self) -> SequenceRun:
        """Return the text on its way through the weights that one device has trained."""
        return text_run(self.plan, self.right.weights, self.biases, self.tokens)

    def claims(self) -> tuple[ClaimResult, ...]:
        """The claims about exports and imports."""
        note, reason = ", ".join(export.name for export in self.exports), why_not_read(self.plan)
        note += reason and f"; not read by transformers: {reason}"
        return (
            judged(PROVE_TRAINER_EXPORT, _EXPORTED, list(self.export_checks()), note=note),
            judged(PROVE_TRAINER_IMPORT, _IMPORTED, list(self.import_checks())),
        )

    def export_checks(self) -> Iterator[Check]:
        """Compare the logits of each export that keeps its digits, as another library reads it."""
        right_TV = logits_of(self.forward())
        for position, export in enumerate(self.exports):
            folder = self.folder / f"exported-{position}"
            if export.adapters:
                yield from self._adapter_checks(export, folder, position)
                continue
            if export.dtype not in ("fp64", "fp32"):
                yield from self._rounded_checks(export, folder, position)
                continue
            check = self._logit_check(export, folder, right_TV, position)
            # Written so that NaN fails.
            if not check.error <= check.allowed:
                tensor, says = self._cause(export, folder)
                check = replace(check, subject=f"{export.name}: {tensor}", detail=says)
            yield check

    def _logit_check(
        self, export: Export, folder: Path, right_TV: torch.Tensor, position: int
    ) -> Check:
        subject = f"logits of {export.name}"
        try:
            logits_TV = self._logits(export, folder)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            return exact_check(0, subject, f"it is not read: {first_line(error)}", position)
        error = relative_error(logits_TV, right_TV, 0.0)
        # Each matmul adds to the error of rounded weights.
        allowed = _LOGITS * _allowed(export) if export.dtype != "fp64" else _allowed(export)
        return Check(0, subject, error, allowed=allowed, position=position)

    def _logits(self, export: Export, folder: Path) -> torch.Tensor:
        if export.model_type is not None:
            state = None if export.to == _HUB else read_tensors(folder)
            return FolderModel(folder, state).logits(self.tokens)
        weights = own_weights(export, self.base, read_tensors(folder))
        biases = {
            block: weights.get(router_bias_name(block), bias) for block, bias in self.biases.items()
        }
        return logits_of(text_run(_as_read(self.plan), weights, biases, self.tokens))

    def _rounded_checks(self, export: Export, folder: Path, position: int) -> Iterator[Check]:
        """Compare each tensor with the same one in float64: it is the nearest number of its dtype.

        The first export has that name and float64.
        """
        exact = read_tensors(self.folder / "exported-0")
        step = torch.finfo(TORCH_DTYPES[export.dtype]).eps / 2 * (1 + _ROUNDED)
        for name, stored in read_tensors(folder).items():
            off = (stored.double() - exact[name]).abs() - step * exact[name].abs()
            far = int((off > torch.finfo(TORCH_DTYPES[export.dtype]).smallest_normal).sum())
            problem = f"{far} elements are not rounded to the nearest number" * (far > 0)
            yield exact_check(0, f"{export.name}: {name}", problem, position)

    def _adapter_checks(self, export: Export, folder: Path, position: int) -> Iterator[Check]:
        """Compare each weight of the model plus s B A of its layer, as PEFT adds them."""
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        stored = load_file(folder / "adapter_model.safetensors")
        scale = config["lora_alpha"] / config["r"] ** (0.5 if config["use_rslora"] else 1.0)
        hub = next(place for place, one in enumerate(self.exports) if one.to == _HUB)
        model = FolderModel(self.folder / f"exported-{hub}")
        own = {name: self.right.weights[name] for name in self.weights}
        merged_model, plain = (
            model.given(self.base, values, self.biases) for values in (self.weights, own)
        )
        for name, right in merged_model.items():
            layer = name.removesuffix(".weight")
            factors = [stored.get(f"base_model.model.{layer}.lora_{side}.weight") for side in "AB"]
            added = torch.zeros_like(right)
            if layer.rpartition(".")[2] in config["target_modules"] and None not in factors:
                a_RC, b_RR = (factor.double() for factor in factors if factor is not None)
                added = scale * b_RR @ a_RC
            error = relative_error(plain[name] + added, right, FLOOR)
            detail = ""
            if not error <= _allowed(export):
                detail = how_it_differs(plain[name] + added, right, plain[name])
            subject = f"{export.name}: {name}"
            allowed = _allowed(export)
            yield Check(0, subject, error, allowed=allowed, detail=detail, position=position)

    def import_checks(self) -> Iterator[Check]:
        """Compare every tensor that a run would start with from each export."""
        names = {spec.name for spec in parameters(self.plan.model) if is_adapter(spec.name)}
        adapters = {name: self.right.weights[name] for name in names}
        for position, export in enumerate(self.exports):
            file = self.folder / f"imported-{position}.safetensors"
            imported, wanted = load_file(file), {**self.weights, **self._named_biases()}
            if export.to == _UNIVERSAL:
                wanted |= self._moments()
            for name, right in (adapters if export.adapters else wanted).items():
                subject, detail = f"{export.name}: {name}", ""
                if name not in imported:
                    yield exact_check(0, subject, "it is not there", position)
                    continue
                error, allowed = relative_error(imported[name], right, FLOOR), _allowed(export)
                if not error <= allowed:
                    detail = how_it_differs(imported[name], right, self.right.weights.get(name))
                yield Check(0, subject, error, allowed=allowed, detail=detail, position=position)

    def _moments(self) -> dict[str, torch.Tensor]:
        """Return AdamW's means of clipped gradients and of their squares; empty without them.

        No export has the moments of adapters or islands.
        """
        optimizer = self.plan.mathematics.optimizer
        if optimizer.kind != "adamw" or self.plan.model.lora or len(self.right.islands) > 1:
            return {}
        moments = {
            f"{kind} {name}": torch.zeros_like(weight)
            for kind in ("exp_avg", "exp_avg_sq")
            for name, weight in self.weights.items()
        }
        for step in self.right.steps:
            clip = optimizer.clip_norm or step.grad_norm
            for name, gradient in step.gradients.items():
                clipped = gradient * min(1.0, clip / step.grad_norm)
                moments[f"exp_avg {name}"].lerp_(clipped, 1 - optimizer.beta1)
                moments[f"exp_avg_sq {name}"].lerp_(clipped.square(), 1 - optimizer.beta2)
        return moments

    def _named_biases(self) -> dict[str, torch.Tensor]:
        """Return the biases of routers that a model keeps, by name."""
        names = {spec.name for spec in router_biases(self.base)}
        named = {router_bias_name(block): bias for block, bias in self.biases.items()}
        return {name: bias for name, bias in named.items() if name in names}

    def _cause(self, export: Export, folder: Path) -> tuple[str, str]:
        """Return the first wrong tensor of an export and its mistake; if none, the first part."""
        model: FolderModel | None = None
        try:
            stored = read_tensors(folder)
            if export.model_type is None:
                right: Mapping[str, torch.Tensor] = self.weights
                plain: Mapping[str, torch.Tensor] = self.right.weights
                stored = own_weights(export, self.base, stored)
            else:
                model = FolderModel(folder, stored if export.to != _HUB else None)
                stored = model.state()
                right = model.given(self.base, self.weights, self.biases)
                own = {name: self.right.weights[name] for name in self.weights}
                plain = model.given(self.base, own, self.biases)
        except (OSError, ValueError, RuntimeError, KeyError, AssertionError) as error:
            return "logits", f"it is not read: {first_line(error)}"
        for name, value in right.items():
            if name not in stored:
                return name, "it is not there"
            same = stored[name].shape == value.shape
            if not same or not relative_error(stored[name], value, FLOOR) <= _allowed(export):
                return name, how_it_differs(stored[name], value, plain.get(name))
        if model is None:
            return "logits", "every tensor is right, and the text is not"
        part = model.first_part_unlike(_as_read(self.plan), self.forward())
        where, off = ("logits", "") if part is None else (f"{part.part} of {part.unit}", part.says)
        return where, f"tensors are as our table of names has them, and transformers differs: {off}"


def _allowed(export: Export) -> float:
    """Largest relative error of a tensor that is rounded once."""
    return max(FLOAT64_TOLERANCE, torch.finfo(TORCH_DTYPES[export.dtype]).eps)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder, read by the libraries whose formats these are.

    Files of safetensors, with or without an index; a universal folder of DeepSpeed; a checkpoint of
    torch.distributed.checkpoint or of Megatron-core's torch_dist.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: load_file(folder / name) for name in {*places.values()}}
        return {key: files[name][key] for key, name in places.items()}
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")
    values = {file.parent.name: file for file in sorted(folder.rglob("fp32.pt"))}
    if values:
        return {key: torch.load(file)["param"] for key, file in values.items()}
    if ranks := sorted(folder.rglob("model_optim_rng.pt")):
        return joined_ranks({_rank_of(file): torch.load(file)["model"] for file in ranks})
    saved = next(folder.rglob(".metadata")).parent
    # As long as torch itself to import, and only exports need it.
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata: Mapping[str, Any] = FileSystemReader(saved).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # one process is meant
        load(state, storage_reader=FileSystemReader(saved), no_dist=True)
    return state


def _rank_of(file: Path) -> tuple[int, int]:
    """Return the stage and tensor rank of a file in mp_rank_TT_PPP, or mp_rank_TT of one stage."""
    tensor, *stage = file.parent.name.removeprefix("mp_rank_").split("_")
    return int(stage[0]) if stage else 0, int(tensor)


def own_weights(
    export: Export, model: ModelShape, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the weights of an export without names of transformers by our own names, float64."""
    wide = {name: value.double() for name, value in tensors.items()}
    names = export.to.removesuffix("-legacy")
    return wide if export.to == _OWN else LAYOUTS[names].weights(model, wide)


def how_it_differs(
    stored: torch.Tensor, right: torch.Tensor, plain: torch.Tensor | None = None
) -> str:
    """Explain a wrong tensor in words; `plain` is the right one without its adapter."""
    if stored.shape != right.shape:
        return f"its shape is {list(stored.shape)} instead of {list(right.shape)}"
    stored, right = stored.double(), right.double()
    explanations: list[Callable[[], str]] = [lambda: _factor(stored, right)]
    if plain is not None and plain.shape == right.shape:
        added = right - plain.double()
        explanations.insert(0, lambda: _factor(stored - plain.double(), added, "its adapter is "))
    if right.dim() == 2:
        explanations += [lambda: _turned(stored, right), lambda: _moved(stored, right)]
    for explain in explanations:
        if says := explain():
            return says
    wrong = (stored - right).abs().reshape(len(right), -1).amax(-1) > EXPLAINED * right.abs().max()
    rows = wrong.nonzero().flatten().tolist()
    zero = " and zero" * (not stored[wrong].any())
    return f"{len(rows)} of {len(right)} rows are wrong{zero}, the first is {rows[0]}"


def _factor(stored: torch.Tensor, right: torch.Tensor, of: str = "") -> str:
    factor, residual = fit_factor(stored, right)
    close = residual <= EXPLAINED and abs(factor - 1) > EXPLAINED
    return f"{of}{factor:.6g} x the right one" * close


def _turned(stored: torch.Tensor, right: torch.Tensor) -> str:
    square = right.shape[0] == right.shape[1]
    return "it is transposed" * (square and relative_error(stored, right.T, 0.0) <= EXPLAINED)


def _moved(stored_RC: torch.Tensor, right_RC: torch.Tensor) -> str:
    """Name the first row that is in the place of another; "" if a row is of no right one."""
    apart = torch.cdist(stored_RC, right_RC, compute_mode="donot_use_mm_for_euclid_dist")
    distance, nearest = apart.min(-1)
    if float(distance.max()) > EXPLAINED * float(right_RC.norm(dim=-1).max()):
        return ""
    order: list[int] = nearest.tolist()
    first = next((row for row, other in enumerate(order) if row != other), None)
    if first is None:
        return ""
    kind = "in another order" if len({*order}) == len(order) else "not all there"
    return f"its rows are {kind}: row {first} is row {order[first]} of the right one"
