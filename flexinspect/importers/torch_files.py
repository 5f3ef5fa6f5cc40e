"""Tensors of `.pt` files as numpy arrays, without torch and without running code of the file.

A `.pt` file of torch 1.6 or later is a zip archive: `NAME/data.pkl` is a pickle of the structure,
`NAME/data/KEY` are the bytes of each storage. A pickle may name any function and call it when it
is loaded. This unpickler knows the few functions that rebuild tensors and refuses all others.
torch's own `weights_only=True` does the same, but would load torch into the viewer.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct

from flexinspect.core.errors import UsageError
from flexinspect.core.text import escape_unprintable
from flexinspect.importers.tensor_files import Tensor, check_size, storage_type, to_tensor

MAX_PICKLE_BYTES = 64 << 20
"""Size up to which the structure of a file is read: that of 10 000 tensors takes 2 MB."""

_STORAGES = {
    **dict(zip(("Float", "Double", "Half"), ("float32", "float64", "float16"), strict=True)),
    **dict(zip(("Byte", "Char", "Short"), ("uint8", "int8", "int16"), strict=True)),
    **dict(
        zip(
            ("Int", "Long", "Bool", "BFloat16"), ("int32", "int64", "bool", "bfloat16"), strict=True
        )
    ),
}
_TYPES: Mapping[str, str] = {
    **{f"{name}Storage": dtype for name, dtype in _STORAGES.items()},
    # Types without a storage class of their own are stored as bytes, with the dtype beside them.
    **{name: name for name in ("uint16", "uint32", "uint64")},
}
"""Numpy types by torch's storage class or dtype."""


class _StorageType(Struct, frozen=True):
    """A storage class or a dtype of torch; the dtype is "" if numpy has no such type."""

    dtype: str


class _Storage(Struct, frozen=True):
    """A storage of the archive, read when a tensor needs it."""

    archive: _Archive
    key: str
    dtype: str


class UnreadableTensor(Struct, frozen=True):
    """A tensor whose type numpy does not have, for instance float8."""

    reason: str


class LazyTensor(Struct, frozen=True):
    """A tensor of the file; `read` returns its elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self) -> Tensor:
        """Read the elements. Raises `UsageError` for a tensor that its storage cannot hold."""
        name = f"A tensor in {self.storage.archive.path}"
        dtype, n = self.storage.dtype, math.prod(self.shape)
        item = storage_type(dtype)
        check_size(n * item.itemsize, name)
        data = self.storage.archive.read(f"data/{self.storage.key}")
        elements = np.frombuffer(data, item, len(data) // item.itemsize)
        spans = zip(self.shape, self.stride, strict=True)
        last = self.offset + sum((length - 1) * step for length, step in spans)
        if n == 0:
            return Tensor(np.zeros(self.shape, item.newbyteorder("=")), dtype)
        if last >= len(elements):
            raise UsageError(f"{name} is damaged: it needs more bytes than the file has.")
        strides = tuple(step * item.itemsize for step in self.stride)
        view = np.lib.stride_tricks.as_strided(elements[self.offset :], self.shape, strides)
        return to_tensor(np.ascontiguousarray(view).reshape(self.shape), dtype)


class _Archive:
    """The zip archive of a file. Members are stored, never compressed: nothing can inflate."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                members = {info.filename: info for info in archive.infolist()}
        except Exception as error:  # zipfile raises anything for a damaged archive
            what = f"{path} is not a .pt file of torch 1.6 or later, or it is damaged."
            raise UsageError(what, hint="Write it again with torch.save.") from error
        roots = [name[: -len("data.pkl")] for name in members if name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise UsageError(f"{path} is not a .pt file of torch: it has no data.pkl.")
        self._root, self._members = roots[0], members

    def read(self, name: str, most: int | None = None) -> bytes:
        """Return a member. Raises `UsageError` when it is missing, compressed or too large."""
        info = self._members.get(self._root + name)
        if info is None or info.compress_type != zipfile.ZIP_STORED:
            raise UsageError(f"{self.path} is damaged: its part {name} is missing or compressed.")
        if most is not None and info.file_size > most:
            raise UsageError(f"The structure of {self.path} takes {info.file_size >> 20} MiB.")
        check_size(info.file_size, f"{name} in {self.path}")
        try:
            with zipfile.ZipFile(self.path) as archive:
                return archive.read(info)
        except Exception as error:  # as above
            raise UsageError(f"{self.path} is damaged: {name} cannot be read.") from error

    def check_byte_order(self) -> None:
        """Raise `UsageError` for a file of a big-endian machine."""
        if f"{self._root}byteorder" in self._members and self.read("byteorder") != b"little":
            raise UsageError(f"{self.path} was written on a big-endian machine, which is not read.")


def load_torch_file(path: Path) -> Any:
    """Return what a `.pt` file holds; each tensor is a `LazyTensor` or an `UnreadableTensor`.

    Raises `UsageError` for a file that is no such archive, or that names anything but tensors and
    plain data.
    """
    archive = _Archive(path)
    archive.check_byte_order()
    data = io.BytesIO(archive.read("data.pkl", MAX_PICKLE_BYTES))
    try:
        return _TensorUnpickler(data, archive).load()
    except UsageError:
        raise
    except Exception as error:  # an unpickler raises anything for a damaged file
        hint = "Write it again with torch.save."
        raise UsageError(f"{path} is damaged: its structure cannot be read.", hint=hint) from error


# The unpickler in Python keeps its memo in a dict. That in C allocates an array as long as the
# largest index that the file names.
class _TensorUnpickler(pickle._Unpickler):
    """Rebuilds tensors and plain data, and refuses every other name."""

    def __init__(self, file: io.BytesIO, archive: _Archive) -> None:
        super().__init__(file, encoding="utf-8")
        self._archive = archive

    def _ignore_state(self) -> None:
        """Drop the attributes that a file sets on an object, such as `_metadata` of a dict."""
        self.stack.pop()  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: _ignore_state,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the known functions. Raises `UsageError` for any other name."""
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and name in _TYPES:
            return _StorageType(_TYPES[name])
        if module == "torch" and (name.startswith("float") or name.endswith("Storage")):
            return _StorageType("")
        if module == "torch.storage" and name in ("UntypedStorage", "TypedStorage"):
            return _StorageType("uint8")
        what = f"{module}.{name}"
        raise UsageError(
            f"{self._archive.path} names {escape_unprintable(what)[:100]}, which is neither a "
            "tensor nor plain data; nothing of it was run.",
            hint="Only import files that hold tensors, numbers, texts, lists and dicts.",
        )

    def persistent_load(self, pid: Any) -> _Storage:
        """Return the storage that a persistent id names."""
        tag, kind, key, _location, _n = pid
        if tag != "storage" or not isinstance(kind, _StorageType) or not isinstance(key, str):
            raise ValueError("an unknown persistent id")
        return _Storage(self._archive, key, kind.dtype)


def _rebuild_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, *_rest: Any
) -> LazyTensor | UnreadableTensor:
    """Stand in for `torch._utils._rebuild_tensor_v2`."""
    if not storage.dtype:
        return UnreadableTensor("its type does not exist in numpy")
    sizes = (offset, *shape, *stride)
    if len(shape) != len(stride) or any(type(n) is not int or n < 0 for n in sizes):
        raise ValueError("a tensor has an invalid shape")
    return LazyTensor(storage, offset, tuple(shape), tuple(stride))


def _rebuild_typed_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> LazyTensor | UnreadableTensor:
    """Stand in for `torch._utils._rebuild_tensor_v3`, whose storage is untyped."""
    typed = _Storage(storage.archive, storage.key, dtype.dtype)
    return _rebuild_tensor(typed, offset, shape, stride)


def _first_argument(value: Any, *_rest: Any) -> Any:
    """Stand in for `torch._utils._rebuild_parameter`, which wraps a tensor."""
    return value


def _make_size(sizes: Sequence[int] = ()) -> tuple[int, ...]:
    """Stand in for `torch.Size`."""
    return tuple(sizes)


_ALLOWED: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): _make_size,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_typed_tensor,
    ("torch._utils", "_rebuild_parameter"): _first_argument,
}
"""Everything that a pickle may call, besides the types of storages."""
