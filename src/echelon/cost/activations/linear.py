# SPDX-License-Identifier: Apache-2.0
"""What norms, linear layers and the dense MLP of a block keep, and work with.

In the letters of `cost/activations/numbers.py`. A column-parallel layer keeps the rows of its input
that are here (under sequence parallelism they are gathered again in backward), a row-parallel one
its input; from B to W the gradient of the output waits beside them.

While a layer runs backward, the gradient of the stream is there (n D s) for the way around the
branch; over tensor ranks the weight gradients of the row layer wait for the collective of the
column layer, with what they need, and those of the column layer, under sequence parallelism, for
the next gather.

Source: Korthikanti et al., 2022, sections 4.1 and 4.2.2 (sequence parallelism), for the operators
of `parallel/kernels/fused.py`: SwiGLU keeps gate and up only, norms their input and one or two
numbers for each row.

A product of 8-bit numbers (`parallel/kernels/fp8.py`): its weight is cast before it, unless codes
of it were gathered. A kernel of a GPU reads the codes, turned where the product is with the weight
itself. Elsewhere both operands are widened, on a CPU to at least float32, and so is the result,
until it is cast. Not counted: the few rows that are cast at a time, which are more than 2 % of a
small model only in float64, where proofs run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.activations.numbers import (
    ActivationNumbers,
    Num,
    OperatorMemory,
    SavedTensor,
    elementwise_max,
    holds,
    is_positive,
    saved_tensors,
)
from echelon.cost.bytes.context_memory import on_gpu
from echelon.cost.bytes.quantised import CODE_BYTES, fp8_row_bytes, widened_element_bytes
from echelon.cost.bytes.terms import WIDE_BYTES

ATTENTION_IN, ATTENTION_OUT, MLP_IN, MLP_OUT, LATENT_DOWN, LATENT_QUERIES, LATENT_KEYS = range(7)
"""Places of the layers of a block in `LINEAR_GROUPS` and, behind them, `LATENT_GROUPS`."""

ATTENTION_DROPOUT, MLP_DROPOUT, DOWN = "attention dropout", "mlp dropout", "down"

POST_NORMS = "attention post norm", "mlp post norm"

_DRAWN = 4 * 8
"""Bytes of an element of a mask while it is drawn: four numbers of 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualBranch:
    """Say what is there beside an operator of a branch of a block.

    `local` are variables of the forward pass that live on; `late` is what weight gradients that
    were put off keep between the row layer and the column layer of the branch, and `inner` the
    input of the row layer, which they keep, too. Where something is sent between the two they
    `flushed` by then. `alone` says that no layer keeps the gradient of the stream until W. `groups`
    are the places of its column and its row layers in `LINEAR_GROUPS`.
    """

    local: Num = 0
    inner: Num = 0
    column: Num = 0
    flushed: Num = 0
    alone: Num = 0
    groups: tuple[int, int] = (MLP_IN, MLP_OUT)

    def split_stream_gradient(self, x: ActivationNumbers) -> Num:
        """Return the gradient of the stream that goes around in B, where it may wait for W anyway.

        In a whole backward pass it is always there.
        """
        # Beside attention the output layer of the MLP may keep the same gradient.
        elsewhere = x.parallel * x.learns(MLP_OUT)
        alone = elementwise_max(self.alone, (1 - x.learns(self.groups[1])) * (1 - elsewhere))
        waits = elementwise_max(x.scattered, x.apart, alone)
        return x.stream * waits + x.beside * x.stream

    def row_layer_bytes(self, x: ActivationNumbers) -> Num:
        """Return what the weight gradient of the row layer keeps, where that is put off."""
        kept = self.inner + elementwise_max(x.scattered, x.apart) * x.whole
        narrow = _kept_bytes(x, self.inner) + x.product_bytes(x.tokens * x.hidden)
        kept = (1 - x.in_fp8) * kept + x.in_fp8 * narrow
        return x.learns(self.groups[1]) * (1 - self.flushed) * x.shared * kept

    def column_layer_bytes(self, x: ActivationNumbers) -> Num:
        """Return what the weight gradients of the column layer keep after it."""
        narrow = _kept_bytes(x, self.column) + x.product_bytes((x.tokens + x.rows) * x.hidden)
        wide = self.column + x.whole + x.stream
        kept = x.in_fp8 * narrow + (1 - x.in_fp8) * wide
        return x.learns(self.groups[0]) * x.scattered * kept

    def around(
        self, x: ActivationNumbers, operator: OperatorMemory, late: Num | None = None
    ) -> OperatorMemory:
        """Return an operator of the branch, whose `backward` is its own, with what is beside it.

        In a whole backward pass that is what is `late`, too: by default what the row layer put off.
        """
        kept = self.row_layer_bytes(x) if late is None else late
        own = operator.output_gradient + x.one_norm * x.stream
        if late is None:
            own = own + self.output_gradient_bytes(x)
        return replace(
            operator,
            backward=x.around + kept + operator.backward,
            backward_split=self.split_stream_gradient(x) + operator.backward,
            output_gradient=own,
        )

    def output_gradient_bytes(self, x: ActivationNumbers) -> Num:
        """Return what of `row_layer_bytes` is the gradient of the block's output."""
        kept = x.learns(self.groups[1]) * (1 - self.flushed) * x.shared * (1 - x.in_fp8)
        return kept * (1 - x.scattered) * x.passed_on * x.stream


def _kept_bytes(x: ActivationNumbers, size: Num) -> Num:
    """Return what a layer keeps of numbers that take so many bytes in the dtype of parameters."""
    narrow = x.product_bytes(size // elementwise_max(x.size, 1))
    return x.in_fp8 * narrow + (1 - x.in_fp8) * size


def weight_gradient_bytes(x: ActivationNumbers, outputs: Num, inputs: Num, rows: Num) -> Num:
    """Return what the weight gradient of a layer of a block has beside its operands and its sum.

    Of 8-bit numbers it multiplies what they stand for, in the dtype of parameters. Where a whole
    matrix has one scale a GPU multiplies the codes, turned, and adds its product up after that.
    """
    width = outputs + inputs
    turned = x.fp8_whole * (1 - x.widens)
    numbers = (1 - turned) * rows * width * x.size
    codes = turned * (rows * width * CODE_BYTES + outputs * inputs * WIDE_BYTES)
    return x.widened_bytes(width, rows) + x.in_fp8 * (numbers + codes)


def norm_saved(x: ActivationNumbers, name: str) -> tuple[SavedTensor, ...]:
    """Return what a norm keeps: the residual stream, which every other user of it has then."""
    statistics = (1 + x.layer_norm) * x.rows * x.statistics_bytes
    return saved_tensors(
        name, ("residual stream", x.stream, "n D s"), ("statistics", statistics, "n w")
    )


def column_input(x: ActivationNumbers, name: str, what: str, group: int) -> SavedTensor:
    """Return what column-parallel layers keep: the rows of their input that are here.

    Frozen ones without an adapter (`group`: their place) have no gradient to compute from it.
    """
    kept = x.learns(group) * x.matmul_stream
    return SavedTensor(operator=name, name=what, bytes=kept, formula="n D s")


def dropout_saved(x: ActivationNumbers, name: str) -> SavedTensor:
    """Return the mask that a dropout keeps."""
    each = x.low_precision + (1 - x.low_precision) * x.size
    mask = x.dropout * x.rows * x.hidden * each
    return SavedTensor(operator=name, name="mask", bytes=mask, formula="n D s")


def mlp_saved(x: ActivationNumbers) -> tuple[SavedTensor, ...]:
    """Return what a dense MLP keeps, from the norm before to the input of its last layer."""
    norm, column = norm_saved(x, "mlp norm"), column_input(x, "gate, up", "mlp input", MLP_IN)
    return (*norm, column, *_gate_and_up(x), *_down_input(x))


def _gate_and_up(x: ActivationNumbers) -> tuple[SavedTensor, ...]:
    made = x.up * (x.tokens * x.inner * x.size)
    return saved_tensors("activation", ("gate and up", made, "N up F s"))


def _down_input(x: ActivationNumbers) -> tuple[SavedTensor, ...]:
    kept = x.learns(MLP_OUT) * x.product_bytes(x.tokens * x.inner)
    return saved_tensors(DOWN, ("input", kept, "N F s"))


def post_norm_operator(x: ActivationNumbers, name: str) -> OperatorMemory:
    """Return a norm of what a branch gives, which it keeps; its gradient is that of the stream."""
    norm = norm_operator(x, name)
    kept, statistics = norm.saved
    return replace(norm, saved=(replace(kept, name="output of the branch"), statistics))


def norm_operator(
    x: ActivationNumbers, name: str, branch: ResidualBranch | None = None
) -> OperatorMemory:
    """Return a norm of the residual stream, which it keeps: every other user of it has it then.

    Without a branch it is the last one, around which nothing goes.
    """
    times = 1 + x.layer_norm
    statistics, vectors = times * x.rows * x.statistics_bytes, times * x.hidden * x.statistics_bytes
    piece = x.chunk_rows(x.rows, x.hidden) * x.hidden * x.statistics_bytes
    wide, plain, pieces = 1 - x.low_precision, 1 - x.layer_norm, 1 - x.fused_norm
    forward = 2 * x.stream + statistics + pieces * x.low_precision * (piece * times + vectors)
    work = x.stream * (2 + 2 * pieces * wide * plain) + vectors
    work = work + pieces * x.rows * x.statistics_bytes * plain
    work = work + pieces * x.low_precision * (3 * piece + times * vectors)
    work = work + x.fused_norm * x.sum_bytes(x.rows, x.hidden)
    operator = OperatorMemory(
        name=name,
        saved=norm_saved(x, name),
        kept_for_weight_gradient=(vector_gradient_bytes(name, (1 - x.frozen) * vectors, "D w"),),
        forward=forward + (0 if branch is None else branch.local),
        backward=work,
        backward_split=work,
    )
    return operator if branch is None else branch.around(x, operator, late=0)


def vector_gradient_bytes(operator: str, size: Num, formula: str) -> SavedTensor:
    """Return the gradient of a vector of weights."""
    return SavedTensor(operator=operator, name="gradients of weights", bytes=size, formula=formula)


def column_parallel_operator(
    x: ActivationNumbers, name: str, what: str, out: Num, branch: ResidualBranch
) -> OperatorMemory:
    """Return column-parallel layers that read the same normed stream; `out` columns together."""
    group = branch.groups[0]
    saved = column_input(x, name, what, group)
    learns, narrow = x.learns(group), x.narrow_bytes(group)
    made = x.tokens * out * x.size
    kept = learns * _kept_bytes(x, made)
    (gradient,) = saved_tensors(name, ("gradient of the output", kept, "N O s"))
    # Under sequence parallelism the product of these layers comes later, that of the row layer now.
    width = out * (1 - x.scattered) + x.scattered * (
        branch.inner // elementwise_max(x.tokens * x.size, 1)
    )
    product = weight_gradient_bytes(x, width, x.hidden, x.tokens)
    product = (1 - x.frozen) * product + narrow
    ahead = x.in_fp8 * saved.bytes + fp8_product_bytes(x, out, x.hidden, x.tokens)
    back = fp8_product_bytes(x, out, x.hidden, x.tokens, turned=1)
    # The rows of its input that are here go when all of them have come.
    product_now = (1 - x.frozen) * weight_gradient_bytes(x, out, x.hidden, x.tokens) + narrow
    peak = elementwise_max(0, product_now - x.stream)
    operator = OperatorMemory(
        name=name,
        saved=(saved,),
        kept_for_weight_gradient=(saved, gradient),
        forward=branch.local + x.stream + x.gathered_bytes(x.whole) + made + ahead + narrow,
        backward=made + x.in_fp8 * kept + x.summed_bytes(x.whole) + back,
        output_gradient=branch.output_gradient_bytes(x),
        deferred=branch.column_layer_bytes(x),
        deferred_peak=learns * x.scattered * peak,
    )
    gathered = learns * (x.scattered * x.whole - x.left_early(x.whole))
    late = branch.row_layer_bytes(x) + gathered + elementwise_max(0, product - back)
    return branch.around(x, operator, late=late)


def row_parallel_operator(
    x: ActivationNumbers,
    name: str,
    inputs: Num,
    bias: Num,
    local: Num = 0,
    group: int = ATTENTION_OUT,
) -> OperatorMemory:
    """Return a row-parallel layer; what kept its input is told where it was made.

    `group` is its place in `LINEAR_GROUPS`.
    """
    learns, narrow = x.learns(group), x.narrow_bytes(group)
    work = x.around + x.apart * x.stream + x.scattered * x.whole + inputs
    width = inputs // elementwise_max(x.tokens * x.size, 1)
    read = x.in_fp8 * _kept_bytes(x, inputs)
    ahead = read + fp8_product_bytes(x, x.hidden, width, x.tokens)
    back = fp8_product_bytes(x, x.hidden, width, x.tokens, turned=1)
    late = weight_gradient_bytes(x, x.hidden, width, x.tokens) * (1 - x.shared)
    late = (1 - x.frozen) * late + narrow
    coded = x.in_fp8 * _kept_bytes(x, x.whole)
    return OperatorMemory(
        name=name,
        kept_for_weight_gradient=(
            *saved_tensors(
                name,
                ("input", learns * _kept_bytes(x, inputs), "N I s"),
                ("gradient of the output", learns * _kept_bytes(x, x.whole), "N D s"),
            ),
            vector_gradient_bytes(
                name, (1 - x.frozen) * bias * x.hidden * x.statistics_bytes, "D w"
            ),
        ),
        forward=local
        + elementwise_max(x.summed_bytes(x.whole), x.in_fp8 * x.whole + ahead, x.whole + narrow),
        backward=work + coded + elementwise_max(late, back),
        backward_split=work + coded + back,
        output_gradient=(x.one_norm + x.passed_on) * x.stream,
        early=work - inputs,
    )


def mlp_sum_operator(x: ActivationNumbers) -> OperatorMemory:
    """Return what adds the output of an MLP to the stream, which is there for that alone where
    attention has been beside the MLP."""
    one = dropout_operator(x, MLP_DROPOUT)
    return replace(one, forward=one.forward + x.parallel * x.stream)


def dropout_operator(x: ActivationNumbers, name: str, *, adds: int = 1) -> OperatorMemory:
    """Return a dropout, which keeps its mask, and the sum of its output with the stream.

    That of the embedding `adds` nothing. A factor of the model makes as much, and keeps nothing.
    """
    saved = dropout_saved(x, name)
    apart = x.changed if adds else elementwise_max(x.dropout, x.embedding_multiplied)
    drawn = x.dropout * _DRAWN * x.rows * (x.hidden + 1)
    return OperatorMemory(
        name=name,
        saved=(saved,),
        forward=x.stream
        + elementwise_max(adds * x.stream, drawn, apart * (1 + adds) * x.stream + saved.bytes),
        backward=(1 + apart) * x.stream,
        backward_split=(1 + apart) * x.stream,
    )


def mlp_branch(x: ActivationNumbers) -> ResidualBranch:
    """Return what is there beside the operators of a dense MLP."""
    inner = x.tokens * x.inner * x.size
    return ResidualBranch(local=x.stream, inner=inner, column=x.up * inner)


def _mlp_norm(x: ActivationNumbers, branch: ResidualBranch) -> tuple[OperatorMemory, ...]:
    """Return the norm before an MLP, where there is one of its own."""
    if holds(x.one_norm) or not holds(x.norm_before):
        return ()
    norm = norm_operator(x, "mlp norm", branch)
    if not holds(x.parallel):
        return (norm,)
    # The norm before attention keeps the same stream.
    kept, statistics = norm.saved
    return (replace(norm, saved=(statistics,), forward=norm.forward - kept.bytes),)


def _without_shared(x: ActivationNumbers, kept: tuple[SavedTensor, ...]) -> tuple[SavedTensor, ...]:
    """Leave out the gradient of the stream where the output layer of attention keeps it, too."""
    shared = x.parallel * (1 - x.changed) * (1 - x.scattered) * (1 - x.in_fp8)
    shared = shared * x.learns(ATTENTION_OUT)
    inputs, gradient, bias = kept
    return inputs, replace(gradient, bytes=(1 - shared) * gradient.bytes), bias


def _shared_input(x: ActivationNumbers, columns: OperatorMemory) -> OperatorMemory:
    """Return layers whose input those of attention keep, too, where they learn from it."""
    kept = x.learns(ATTENTION_IN) * (1 - x.in_fp8)
    saved, *waiting = columns.kept_for_weight_gradient
    own = replace(saved, bytes=(1 - kept) * saved.bytes)
    return replace(
        columns,
        saved=(own,),
        kept_for_weight_gradient=(own, *waiting),
        forward=columns.forward - x.learns(ATTENTION_IN) * x.stream,
    )


def mlp_operators(x: ActivationNumbers) -> tuple[OperatorMemory, ...]:
    """Return the operators of a dense MLP, from the norm before to the output."""
    inner = x.tokens * x.inner * x.size
    branch = mlp_branch(x)
    gated = (x.up - 1) * (1 - x.fused_swiglu)
    piece = x.chunk_rows(x.tokens, x.up * x.inner) * x.inner * x.size
    work = (
        inner + x.up * inner + gated * (x.low_precision * inner + (1 - x.low_precision) * 2 * piece)
    )
    down = row_parallel_operator(x, DOWN, inner, x.mlp_bias, x.stream, MLP_OUT)
    columns = column_parallel_operator(x, "gate, up", "mlp input", x.up * x.inner, branch)
    return (
        *_mlp_norm(x, branch),
        _shared_input(x, columns) if holds(x.one_norm) else columns,
        branch.around(
            x,
            OperatorMemory(
                name="activation",
                saved=_gate_and_up(x),
                forward=branch.local + x.up * inner + inner,
                backward=work,
            ),
        ),
        replace(
            down,
            saved=_down_input(x),
            forward=down.forward + inner,
            kept_for_weight_gradient=_without_shared(x, down.kept_for_weight_gradient),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Products:
    """Say how a rank multiplies 8-bit numbers, with the fields of `ActivationNumbers`."""

    size: Num
    wide: Num
    casts: Num

    def bytes(self, outputs: Num, inputs: Num, rows: Num, *, turned: int = 0) -> Num:
        """Return what a product has beside the codes of its rows and its result.

        A weight [outputs, inputs] meets rows of `inputs` numbers, or of `outputs` where `turned`.
        """
        taken, given = (outputs, inputs) if turned else (inputs, outputs)
        weights, wide = outputs * inputs, self.wide
        codes = (self.casts + turned * (1 - is_positive(wide))) * weights * CODE_BYTES
        cast = is_positive(wide - self.size)
        multiplied = rows * (taken * wide + given * (wide - self.size) * cast)
        return codes + weights * wide + elementwise_max(multiplied, cast * rows * given * wide)


def fp8_product_bytes(
    x: ActivationNumbers, outputs: Num, inputs: Num, rows: Num, *, turned: int = 0
) -> Num:
    """Return what a product of a block has beside codes and result; 0 in other dtypes."""
    products = Fp8Products(size=x.size, wide=x.fp8_wide, casts=x.fp8_casts)
    return x.in_fp8 * products.bytes(outputs, inputs, rows, turned=turned)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertProducts:
    """Give what experts have more of in 8 bits: forward, backward, and for weight gradients."""

    forward: int = 0
    backward: int = 0
    weight_gradient: int = 0

    @classmethod
    def of(cls, plan: Plan, inner: int, by_expert: tuple[int, ...]) -> ExpertProducts:
        """Return that of experts of width `inner`, of so many rows each; nothing in other dtypes.

        All rows are cast at once, the products are those of one expert after the other.
        """
        precision, hidden = plan.mathematics.precision, plan.model.hidden
        if not precision.is_fp8:
            return cls()
        size, gpu = DTYPE_BYTES[precision.parameters], on_gpu(plan)
        wide = widened_element_bytes(precision, on_gpu=gpu)
        casts = int(plan.layout.zero.gather != "fp8")
        products = Fp8Products(size=size, wide=wide, casts=casts)
        most, codes = max(by_expert, default=0), fp8_row_bytes(sum(by_expert) * hidden, precision)

        def largest(turned: int) -> int:
            pair = products.bytes(2 * inner, hidden, most, turned=turned)
            return int(elementwise_max(pair, products.bytes(hidden, inner, most, turned=turned)))

        inside = fp8_row_bytes(3 * most * inner, precision)
        return cls(
            forward=codes + largest(0),
            backward=codes + inside + largest(1),
            weight_gradient=most * (2 * inner + hidden) * size,
        )
