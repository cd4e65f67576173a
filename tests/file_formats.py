"""The bytes of files that others have published formats for."""

import struct

import numpy as np


def idx(values: np.ndarray) -> bytes:
    """MNIST's format, of an array of bytes."""
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def shard(tokens, says: int | None = None, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> bytes:
    """llm.c's format: 256 numbers of 32 bits, of which the third ``says`` how many tokens follow, then these."""
    head = struct.pack("<iii", magic, version, len(tokens) if says is None else says).ljust(1024, b"\0")
    return head + np.asarray(tokens).astype(dtype).tobytes()
