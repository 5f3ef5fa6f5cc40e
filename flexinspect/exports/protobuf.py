"""Encoding of protobuf messages, without a library: the wire types that exports need.

https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import struct

from flexinspect.exports.exporter import clean_text

_VARINT, _FIXED64, _LENGTH = 0, 1, 2
_MASK_64 = (1 << 64) - 1


def varint(value: int) -> bytes:
    """Return a whole number of at most 64 bits; a negative one as its two's complement."""
    value &= _MASK_64
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def int_field(number: int, value: int) -> bytes:
    """Return a field of type int32, int64, uint32, uint64, bool or enum."""
    return varint(number << 3 | _VARINT) + varint(value)


def double_field(number: int, value: float) -> bytes:
    """Return a field of type double."""
    return varint(number << 3 | _FIXED64) + struct.pack("<d", value)


def bytes_field(number: int, value: bytes) -> bytes:
    """Return a field of type bytes, or an embedded message."""
    return varint(number << 3 | _LENGTH) + varint(len(value)) + value


def text_field(number: int, text: str) -> bytes:
    """Return a field of type string."""
    return bytes_field(number, clean_text(text).encode())
