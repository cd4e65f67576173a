"""safetensors files that several ranks write together, each its rows, and read row by row.

The library writes a file as a whole from whole tensors. Here the header, which says where each tensor lies, follows
from the names, dtypes and shapes alone, so that every rank knows it and writes its rows to their place.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parallel.sharding import Rows

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a file lies.

    Attributes:
        header: The first bytes of the file.
        offsets: Of each tensor's first byte, by its name.
    """

    header: bytes
    offsets: Mapping[str, int]

    @property
    def digest(self) -> str:
        """Equal for ranks that agree on the layout."""
        return hashlib.sha256(self.header).hexdigest()


def layout_of(tensors: Mapping[str, Rows]) -> Layout:
    """Lay the tensors of a file out, one after the other, those with the widest numbers first (they stay aligned).

    Raises:
        TypeError: safetensors has no such dtype.
    """
    entries, starts, end = {}, {}, 0
    for name, rows in sorted(tensors.items(), key=lambda item: (-item[1].tensor.itemsize, item[0])):
        if rows.tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} is of {rows.tensor.dtype}, which a safetensors file cannot hold")
        start, end = end, end + torch.Size(rows.shape).numel() * rows.tensor.itemsize
        entries[name] = {
            "dtype": _DTYPES[rows.tensor.dtype],
            "shape": list(rows.shape),
            "data_offsets": [start, end],
        }
        starts[name] = start
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return Layout(header, {name: len(header) + start for name, start in starts.items()})


def write_rows(path: Path, tensors: Mapping[str, Rows], first: bool) -> str:
    """Write this rank's rows to their place and flush them to the disk. The file is created if need be.

    Args:
        path: The file.
        tensors: All tensors of the file by name, with this rank's rows of each.
        first: Whether this is the first of the writers, which also writes the header and what is not shared.

    Returns:
        The layout's digest, equal on all writers.

    Raises:
        OSError: The disk is full or not writable.
        TypeError: safetensors has no such dtype.
    """
    layout = layout_of(tensors)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        if first:
            _write(descriptor, layout.header, 0)
        for name, rows in tensors.items():
            if rows.shared or first:
                each = rows.tensor[:1].nbytes if rows.shared else 0
                _write(descriptor, _bytes_of(rows.tensor), layout.offsets[name] + rows.start * each)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return layout.digest


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())


def _write(descriptor: int, content: bytes | memoryview, offset: int) -> None:
    content = memoryview(content)
    while content:
        written = os.pwrite(descriptor, content[: 1 << 30], offset)  # Linux writes 2 GiB at a time, at most
        content, offset = content[written:], offset + written


class StoredTensor:
    """A tensor in a file: its shape, and its rows, which are read when they are asked for.

    Attributes:
        dtype: Of what is read: the file's, until another is set.
    """

    def __init__(self, path: Path, name: str) -> None:
        """Open the file, whose header is read. Raises OSError and SafetensorError."""
        from safetensors import safe_open

        self._file, self._name = safe_open(path, framework="pt"), name
        self._slice = self._file.get_slice(name)
        self.dtype = next((dtype for dtype, kind in _DTYPES.items() if kind == self._slice.get_dtype()), None)

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size(self._slice.get_shape())

    def __getitem__(self, rows: slice) -> Tensor:
        return (self._slice[rows] if isinstance(rows, slice) else self._file.get_tensor(self._name)).to(self.dtype)
