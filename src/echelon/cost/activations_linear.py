"""What norms, linear layers and the dense MLP of a block keep, and work with.

In the letters of `cost/activation_numbers.py`. A column-parallel layer keeps the rows of its input
that are here (under sequence parallelism they are gathered again in backward), a row-parallel one
its input; from B to W the gradient of the output waits beside them.

While a layer runs backward, the gradient of the stream is there (n D s) for the way around the
branch; over tensor ranks the weight gradients of the row layer wait for the collective of the
column layer, with what they need, and those of the column layer, under sequence parallelism, for
the next gather.

Source: Korthikanti et al., 2022, sections 4.1 and 4.2.2 (sequence parallelism), for the operators
of `parallel/kernels.py`: SwiGLU keeps gate and up only, norms their input and one or two numbers
for each row.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.cost.activation_numbers import ActivationNumbers, Num, Operator, Saved, most

ATTENTION_DROPOUT, MLP_DROPOUT, DOWN = "attention dropout", "mlp dropout", "down"

_DRAWN = 4 * 8
"""Bytes of an element of a mask while it is drawn: four numbers of 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Say what is there beside an operator of a branch of a block.

    `local` are variables of the forward pass that live on; `late` is what weight gradients that
    were put off keep between the row layer and the column layer of the branch, and `inner` the
    input of the row layer, which they keep, too. Where something is sent between the two they `ran`
    by then. `alone` says that no layer keeps the gradient of the stream until W.
    """

    local: Num = 0
    inner: Num = 0
    column: Num = 0
    ran: Num = 0
    alone: Num = 0

    def skip(self, x: ActivationNumbers, *, split: bool) -> Num:
        """Return the gradient of the stream that goes around; from B to W it waits anyway."""
        return x.stream * (most(x.scattered, x.dropout, self.alone) if split else 1)

    def late(self, x: ActivationNumbers) -> Num:
        """Return what the weight gradient of the row layer keeps, where that is put off."""
        kept = self.inner + most(x.scattered, x.dropout) * x.whole
        return (1 - self.ran) * x.shared * kept

    def later(self, x: ActivationNumbers) -> Num:
        """Return what the weight gradients of the column layer keep after it."""
        return x.scattered * (self.column + x.whole + x.stream)


def norm(x: ActivationNumbers, name: str, branch: Branch | None = None) -> Operator:
    """Return a norm of the residual stream, which it keeps: every other user of it has it then.

    Without a branch it is the last one, around which nothing goes.
    """
    times = 1 + x.layer_norm
    statistics, vectors = times * x.rows * x.wide, times * x.hidden * x.wide
    piece = x.piece(x.rows, x.hidden) * x.hidden * x.wide
    wide, plain = 1 - x.narrow, 1 - x.layer_norm
    forward = x.stream + x.narrow * (piece * (1 + x.layer_norm) + vectors)
    work = x.stream * (1 + 2 * wide * plain) + vectors
    work = work + x.rows * x.wide * plain + x.narrow * (3 * piece + times * vectors)
    skip = (0, 0) if branch is None else (branch.skip(x, split=False), branch.skip(x, split=True))
    return Operator(
        name=name,
        saved=(
            Saved(operator=name, name="residual stream", bytes=x.stream, formula="n D s"),
            Saved(operator=name, name="statistics", bytes=statistics, formula="n w"),
        ),
        waits=(vector(name, vectors, "D w"),),
        forward=x.stream + forward + statistics + (0 if branch is None else branch.local),
        backward=skip[0] + x.stream + work,
        split=skip[1] + x.stream + work,
    )


def vector(operator: str, size: Num, formula: str) -> Saved:
    """Return the gradient of a vector of weights."""
    return Saved(operator=operator, name="gradients of weights", bytes=size, formula=formula)


def column(x: ActivationNumbers, name: str, what: str, out: Num, branch: Branch) -> Operator:
    """Return column-parallel layers that read the same normed stream; `out` columns together."""
    saved = Saved(operator=name, name=what, bytes=x.stream, formula="n D s")
    made = x.tokens * out * x.size
    gradient = Saved(operator=name, name="gradient of the output", bytes=made, formula="N O s")
    work = made + x.whole + x.scattered * x.stream
    # Under sequence parallelism the product of these layers comes later, that of the row layer now.
    width = out * (1 - x.scattered) + x.scattered * (branch.inner // most(x.tokens * x.size, 1))
    product = x.mixed * width * x.hidden * x.size
    late = branch.late(x) + x.scattered * x.whole + product
    return Operator(
        name=name,
        saved=(saved,),
        waits=(saved, gradient),
        forward=branch.local + x.stream + x.scattered * x.whole + made,
        backward=branch.skip(x, split=False) + work + late,
        split=branch.skip(x, split=True) + work,
        later=branch.later(x),
        # The rows of its input that are here go when all of them have come.
        product=x.scattered * most(0, x.mixed * out * x.hidden * x.size - x.stream),
    )


def row(x: ActivationNumbers, name: str, inputs: Num, bias: Num, local: Num = 0) -> Operator:
    """Return a row-parallel layer; what kept its input is told where it was made."""
    work = x.stream + x.dropout * x.stream + x.scattered * x.whole + inputs
    width = inputs // most(x.tokens, 1)
    return Operator(
        name=name,
        saved=(),
        waits=(
            Saved(operator=name, name="input", bytes=inputs, formula="N I s"),
            Saved(operator=name, name="gradient of the output", bytes=x.whole, formula="N D s"),
            vector(name, bias * x.hidden * x.wide, "D w"),
        ),
        forward=local + x.whole + x.scattered * x.stream,
        backward=work + x.mixed * width * x.hidden * (1 - x.shared),
        split=work,
        early=work - inputs,
    )


def dropout(x: ActivationNumbers, name: str, *, adds: int = 1) -> Operator:
    """Return a dropout, which keeps its mask, and the sum of its output with the stream.

    That of the embedding `adds` nothing.
    """
    each = x.narrow + (1 - x.narrow) * x.size
    mask = x.dropout * x.rows * x.hidden * each
    drawn = x.dropout * _DRAWN * x.rows * (x.hidden + 1)
    return Operator(
        name=name,
        saved=(Saved(operator=name, name="mask", bytes=mask, formula="n D s"),),
        waits=(),
        forward=x.stream + most(adds * x.stream, drawn, x.dropout * (1 + adds) * x.stream + mask),
        backward=(1 + x.dropout) * x.stream,
        split=(1 + x.dropout) * x.stream,
    )


def mlp_operators(x: ActivationNumbers) -> tuple[Operator, ...]:
    """Return the operators of a dense MLP, from the norm before to the output."""
    inner = x.tokens * x.inner * x.size
    branch = Branch(local=x.stream, inner=inner, column=x.up * inner)
    gated = x.up - 1
    piece = x.piece(x.tokens, x.up * x.inner) * x.inner * x.size
    work = inner + x.up * inner + gated * (x.narrow * inner + (1 - x.narrow) * 2 * piece)
    down = row(x, DOWN, inner, x.mlp_bias, x.stream)
    return (
        norm(x, "mlp norm", branch),
        column(x, "gate, up", "mlp input", x.up * x.inner, branch),
        Operator(
            name="activation",
            saved=(
                Saved(
                    operator="activation",
                    name="gate and up",
                    bytes=x.up * inner,
                    formula="N up F s",
                ),
            ),
            waits=(),
            forward=branch.local + x.up * inner + inner,
            backward=branch.skip(x, split=False) + branch.late(x) + work,
            split=branch.skip(x, split=True) + work,
        ),
        Operator(
            name=DOWN,
            saved=(Saved(operator=DOWN, name="input", bytes=inner, formula="N F s"),),
            waits=down.waits,
            forward=down.forward + inner,
            backward=down.backward,
            split=down.split,
            early=down.early,
        ),
    )
