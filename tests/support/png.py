"""A decoder of PNG pictures."""

from __future__ import annotations

import struct
import zlib

import numpy as np


def read_png(png: bytes) -> np.ndarray:
    """Decode a PNG of 8-bit RGB or RGBA to (rows, columns, channels)."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert depth == 8
    n = {2: 3, 6: 4}[kind]
    data, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += length + 12
    lines = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, width * n + 1)
    out = np.zeros((height, width, n), np.uint8)
    above = np.zeros((width, n), np.int64)
    for number, raw in enumerate(lines):
        above = _unfiltered(int(raw[0]), raw[1:].reshape(width, n).astype(np.int64), above)
        out[number] = above
    return out


def _unfiltered(kind: int, raw: np.ndarray, above: np.ndarray) -> np.ndarray:
    """Undo one line's filter; see section 9 of https://www.w3.org/TR/png-3/."""
    if kind == 0:
        return raw
    if kind == 1:
        return raw.cumsum(axis=0) % 256
    if kind == 2:
        return (raw + above) % 256
    here = np.zeros_like(raw)
    left, corner = np.zeros_like(raw[0]), np.zeros_like(raw[0])
    for x in range(len(raw)):
        up = above[x]
        guess = (left + up) // 2 if kind == 3 else _paeth(left, up, corner)
        left, corner = (raw[x] + guess) % 256, up
        here[x] = left
    return here


def _paeth(left: np.ndarray, up: np.ndarray, corner: np.ndarray) -> np.ndarray:
    whole = left + up - corner
    near = [np.abs(whole - one) for one in (left, up, corner)]
    return np.where(
        (near[0] <= near[1]) & (near[0] <= near[2]),
        left,
        np.where(near[1] <= near[2], up, corner),
    )
