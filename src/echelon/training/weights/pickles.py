# SPDX-License-Identifier: Apache-2.0
"""What torch.save wrote, without running any of it: plain values, and where tensors lie.

A pickle names functions and classes, and who unpickles it calls them: so it may run anything. Here
none is called but the few that build plain containers; all else becomes an `Unread`, which holds
what it would have been made of. Tensors become a `PickledTensor`, which says where its bytes are,
so that parts can be read without the rest. No torch is needed.

A file of torch.save is an archive (zip, without compression): `data.pkl` is the pickle, and each
storage a record of its own.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

_LOCAL_HEADER = 30  # bytes before the name of a record
_DTYPES = {
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
}
_STORED_DTYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16"}
_CONTAINERS: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
    ("builtins", "tuple"): tuple,
    ("builtins", "int"): int,
    ("builtins", "float"): float,
    ("builtins", "bool"): bool,
    ("builtins", "complex"): complex,
    ("__builtin__", "set"): set,
}


class NotReadable(Exception):
    """Say why a file cannot be used; never seen by users."""


class Unread:
    """Stand for an object whose class was not looked up: what it would have been made of."""

    module = ""
    name = ""

    def __new__(cls, *arguments: object, **_named: object) -> Unread:
        """Keep the arguments."""
        made = super().__new__(cls)
        made.arguments = arguments
        made.state = None
        made.items = {}
        return made

    arguments: tuple[object, ...]
    state: object
    items: dict[object, object]

    def __init__(self, *_arguments: object, **_named: object) -> None:
        """Do nothing: `__new__` kept what there is."""

    def __setstate__(self, state: object) -> None:
        """Keep the state."""
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        """Keep an entry of a mapping."""
        self.items[key] = value

    def append(self, value: object) -> None:
        """Keep an item of a sequence."""
        self.items[len(self.items)] = value

    def extend(self, values: Sequence[object]) -> None:
        """Keep items of a sequence."""
        for value in values:
            self.append(value)

    def field(self, name: str) -> Any:
        """Return an attribute that the object would have had; None without it."""
        state = self.state
        if isinstance(state, tuple) and len(cast("tuple[object, ...]", state)) == 2:
            state = cast("tuple[object, object]", state)[1] or cast("tuple[object]", state)[0]
        return cast("dict[str, Any]", state).get(name) if isinstance(state, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledTensor:
    """Say where a tensor lies: its elements from byte `start` of `file` on, by `stride`."""

    file: Path
    start: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """Return whether elements lie dim after dim."""
        expected = 1
        for size, stride in zip(self.shape[::-1], self.stride[::-1], strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Storage:
    key: str
    dtype: str
    numel: int


def read_pickle(data: bytes) -> Any:
    """Return what a plain pickle holds, with an `Unread` for each object of a class."""
    return _load(io.BytesIO(data), None)


def read_archive(file: Path, start: int = 0, size: int | None = None) -> Any:
    """Return what torch.save wrote into a file, or into `size` bytes of it from `start` on.

    NotReadable says what is wrong; OSError where the disk refuses.
    """
    with file.open("rb") as stream:
        length = stream.seek(0, io.SEEK_END)
        if start + (size or 0) > length:
            raise NotReadable(f"was cut short: a tensor ends at byte {start + (size or 0)}")
        window = _Window(stream, start, length - start if size is None else size)
        try:
            return _Archive(file, start, window).content()
        except (zipfile.BadZipFile, KeyError) as error:
            raise NotReadable(
                "is no file of torch.save, or was cut short (torch before 1.6 wrote another format)"
            ) from error


class _Archive:
    def __init__(self, file: Path, start: int, window: _Window) -> None:
        self._file, self._start, self._window = file, start, window
        self._zip = zipfile.ZipFile(cast("BinaryIO", window))
        self._records = {info.filename.partition("/")[2]: info for info in self._zip.infolist()}

    def content(self) -> Any:
        order = self._records.get("byteorder")
        if order is not None and self._zip.read(order) != b"little":
            raise NotReadable("has its bytes in big-endian order")
        with self._zip.open(self._records["data.pkl"]) as data:
            return _load(io.BytesIO(data.read()), self)

    def place(self, storage: _Storage) -> int:
        """Return where in the file the bytes of a storage begin."""
        info = self._records[f"data/{storage.key}"]
        if info.compress_type != zipfile.ZIP_STORED:
            raise NotReadable("holds tensors that are compressed")
        self._window.seek(info.header_offset)
        name, extra = struct.unpack("<HH", self._window.read(_LOCAL_HEADER)[26:30])
        return self._start + info.header_offset + _LOCAL_HEADER + name + extra

    def tensor(
        self, storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> PickledTensor:
        sizes = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
        item = sizes.get(storage.dtype, 0)
        last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if shape else 0
        if min((*shape, *stride, offset), default=0) < 0 or (
            item and prod(shape) and offset + last >= storage.numel
        ):
            raise NotReadable("is damaged: a tensor has more elements than its storage")
        return PickledTensor(
            file=self._file,
            start=self.place(storage) + offset * item,
            dtype=storage.dtype,
            shape=tuple(shape),
            stride=tuple(stride),
        )


def _load(stream: BinaryIO, archive: _Archive | None) -> Any:
    try:
        return _Unpickler(stream, archive).load()
    except NotReadable:
        raise
    except Exception as error:  # whatever a damaged pickle does to the classes that stand in here
        raise NotReadable(f"cannot be read: {error}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO, archive: _Archive | None) -> None:
        super().__init__(stream)
        self._archive = archive
        self._classes: dict[tuple[str, str], Any] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return a container, what rebuilds tensors, or a class of its own that holds all else."""
        key = (module_name, global_name)
        if key in _CONTAINERS:
            return _CONTAINERS[key]
        if self._archive is not None and module_name == "torch._utils":
            if global_name == "_rebuild_tensor_v2":
                return self._rebuild
            if global_name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
                return _first
        if key == ("torch._tensor", "_rebuild_from_type_v2"):
            return _of_subclass
        if key not in self._classes:
            made = type(global_name, (Unread,), {"module": module_name, "name": global_name})
            self._classes[key] = made
        return self._classes[key]

    def persistent_load(self, pid: Any, /) -> Any:
        """Return which storage is meant."""
        try:
            _, kind, key, _, numel = pid
        except (TypeError, ValueError) as error:
            raise NotReadable("names tensors in a way that is not known") from error
        name = str(kind.name)
        dtype = _DTYPES.get(name, name.removesuffix("Storage"))
        return _Storage(key=str(key), dtype=dtype, numel=int(numel))

    def _rebuild(
        self,
        storage: _Storage,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        *_rest: object,
    ) -> PickledTensor:
        assert self._archive is not None
        return self._archive.tensor(storage, int(offset), tuple(shape), tuple(stride))


def _first(tensor: object, *_rest: object) -> object:
    return tensor


def _of_subclass(rebuild: Any, _kind: object, arguments: Any, *_state: object) -> object:
    """Return a tensor whose Python object had attributes: as ZeRO 3 saves its buffers."""
    return rebuild(*arguments)


def dtype_name(dtype: object) -> str:
    """Return how safetensors spells a dtype that a pickle names: F32 for `torch.float32`."""
    name = dtype.name if isinstance(dtype, type) and issubclass(dtype, Unread) else str(dtype)
    return _STORED_DTYPES.get(name, name)


class _Window(io.RawIOBase):
    """Some bytes of a file as a file of its own."""

    def __init__(self, stream: BinaryIO, start: int, size: int) -> None:
        super().__init__()
        self._stream, self._start, self._size, self._at = stream, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise zipfile.BadZipFile("it begins after its own end")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        size = max(0, min(len(buffer), self._size - self._at))
        self._stream.seek(self._start + self._at)
        data = self._stream.read(size)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
