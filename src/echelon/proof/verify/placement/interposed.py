# SPDX-License-Identifier: Apache-2.0
"""A call put before a method of one object, and taken off again: the class stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


class Interposed:
    """Call `before` (and `after`, with the result) around a method of one object until removed."""

    def __init__(
        self,
        owner: Any,
        method: str,
        before: Callable[[], None],
        after: Callable[[Any], None] | None = None,
    ) -> None:
        """Put the calls around the method."""
        original = getattr(owner, method)

        @wraps(original)
        def around(*args: Any, **kwargs: Any) -> Any:
            before()
            result = original(*args, **kwargs)
            if after is not None:
                after(result)
            return result

        self._owner = owner
        self._method = method
        self._own = vars(owner).get(method)
        setattr(owner, method, around)

    def remove(self) -> None:
        """Take the calls off: the object has what it had."""
        if self._own is None:
            delattr(self._owner, self._method)
        else:
            setattr(self._owner, self._method, self._own)
