# SPDX-License-Identifier: Apache-2.0
"""What a product of 8-bit numbers works with (`parallel/kernels/fp8.py`), in bytes.

Its weight is cast before it, unless codes of it were gathered. A kernel of a GPU reads the codes,
turned where the product is with the weight itself. Elsewhere both operands are widened, on a CPU to
at least float32, and so is the result, until it is cast. Not counted: the few rows that are cast at
a time, which are more than 2 % of a small model only in float64, where proofs run.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.cost.activations.numbers import ActivationNumbers, Num, elementwise_max, is_positive
from echelon.cost.bytes.context_memory import on_gpu
from echelon.cost.bytes.quantised import CODE_BYTES, fp8_row_bytes, widened_element_bytes


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
