"""Float64 all the way: norms and softmaxes that ask for float32 get what they were given.

Many modules compute a norm or a softmax in float32 whatever their dtype is. In a float64 proof that
rounds, and hides errors below 1e-8. Here a conversion of float64 to float32 is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class StayWide(TorchFunctionMode):
    """Leave float64 tensors as wide as they are, inside of a `with`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function; where it would narrow float64 to float32, float64 stays."""
        named = dict(kwargs or {})
        x = args[0] if args else None
        if torch.is_tensor(x) and x.dtype is torch.float64:
            if func is torch.Tensor.float:
                return x
            args = tuple(torch.float64 if one is torch.float32 else one for one in args)
            if named.get("dtype") is torch.float32:
                named["dtype"] = torch.float64
        return func(*args, **named)
