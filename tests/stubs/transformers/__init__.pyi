"""What the type checker sees of transformers, whose source takes it minutes to read."""

from typing import Any

def __getattr__(name: str) -> Any: ...
