"""Reads values of Kafka's metadata records, in its flexible encoding."""

import struct

from storage.errors import StorageError


class MetadataLogError(StorageError):
    """Kafka's metadata log cannot be used; the message says why."""


class ValueReader:
    """Reads one value. Raises MetadataLogError where the bytes end early."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        data = self._data[self._at : self._at + count]
        if len(data) < count:
            raise MetadataLogError("a record is cut short")
        self._at += count
        return data

    def uvarint(self) -> int:
        """Return an unsigned varint."""
        value = 0
        for shift in range(0, 35, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise MetadataLogError("a varint is too long")

    def int8(self) -> int:
        """Return a signed byte."""
        return int.from_bytes(self.take(1), signed=True)

    def int32(self) -> int:
        """Return a signed integer of four bytes."""
        return int.from_bytes(self.take(4), signed=True)

    def float64(self) -> float:
        """Return a number of eight bytes."""
        (value,) = struct.unpack(">d", self.take(8))
        return float(value)

    def nullable_bytes(self) -> bytes | None:
        """Return bytes after their length; None for null."""
        size = self.uvarint()
        return None if size == 0 else self.take(size - 1)

    def data(self) -> bytes:
        """Return bytes after their length."""
        result = self.nullable_bytes()
        if result is None:
            raise MetadataLogError("a value is null")
        return result

    def nullable_text(self) -> str | None:
        """Return a string; None for null."""
        data = self.nullable_bytes()
        try:
            return None if data is None else data.decode()
        except UnicodeDecodeError as error:
            raise MetadataLogError(f"a text is not UTF-8: {error}") from error

    def text(self) -> str:
        """Return a string."""
        result = self.nullable_text()
        if result is None:
            raise MetadataLogError("a name is null")
        return result

    def count(self) -> int:
        """Return the number of elements of an array."""
        size = self.uvarint()
        if size == 0:
            raise MetadataLogError("an array is null")
        return size - 1

    def skip_tags(self) -> None:
        """Skip the tagged fields of a structure."""
        for _ in range(self.uvarint()):
            self.uvarint()
            self.take(self.uvarint())
