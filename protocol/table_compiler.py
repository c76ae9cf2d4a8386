"""Compile a table into straight-line Python, once for each structure and version.

This module alone knows the layouts of the wire format. A decoder reads from `bytes`, keeps one
position `p`, and checks every length: a string must end inside the frame, an array needs the bytes
of its smallest element for each element that it announces, and a message has at most MAX_ELEMENTS
elements. Memory is therefore proportional to the bytes received. A varint has at most 5 bytes, a
string 32,767, a section of tagged fields 64 fields. Decoders skip unknown tagged fields and ignore
trailing bytes (librdkafka sends some). Invalid input raises ProtocolError or one of
SHORT_READ_ERRORS, which the caller translates.

A sliced codec is a generator that pauses after every ELEMENTS_PER_SLICE rows (elements and tagged
fields), because a message of 100,000 rows takes tens of milliseconds, and after about 256 KiB of
strings. A sliced decoder has a limit on rows. It reads from a memoryview that must not change
meanwhile; fields of type `records` are views of it.

Adjacent fields of fixed size, and the length after them, become one call of a precompiled
`struct.Struct`. The codecs are fast because of this, and because they look up no names at run time.
"""

import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from protocol.errors import ProtocolError, RowLimitError
from protocol.limits import STRING_BYTES_MAX, TAGS_PER_SECTION_MAX
from protocol.messages import CLASSES, Message, default_expression
from protocol.schema import Field, Struct

# In all arrays of one message. Every message of a broker with 100,000 partitions has fewer. At
# about 200 bytes an element this bounds the memory for a frame of 100 MB.
MAX_ELEMENTS: Final = 1_000_000
ELEMENTS_PER_SLICE: Final = 512  # 0.5 us each, 2 us with many fields
BYTES_PER_ROW: Final = 512  # a string of more counts as several rows: 256 KiB in a slice
SHORT_READ_ERRORS: Final = (struct.error, IndexError, UnicodeDecodeError)
MAX_VARINT_BYTES: Final = 5  # an unsigned varint of 32 bits


_Row = TypeVar("_Row", bound=Message)


# The structures that may be `SharedRows`. All others are encoded without looking for it.
SHARED_ROWS: Final = frozenset({"MetadataResponsePartition"})


class SharedRows(list[_Row]):
    """The rows of an array that many responses share: encoded once for each version."""

    def __init__(self, rows: Iterable[_Row] = ()) -> None:
        super().__init__(rows)
        self.encoded: dict[int, bytes] = {}  # by version; codec.encode_rows adds one


Decoder = Callable[[bytes, int], Message]
Encoder = Callable[[Callable[[bytes], None], Message], None]
# (frame, position of the body, maximum of rows)
SlicedDecoder = Callable[[memoryview, int, int], Generator[None, None, Message]]
SlicedEncoder = Callable[[Callable[[bytes], None], Message], Generator[None, None, None]]

_FIXED: Final = {
    "bool": ("?", 1), "int8": ("b", 1), "int16": ("h", 2), "uint16": ("H", 2),
    "int32": ("i", 4), "int64": ("q", 8), "float64": ("d", 8), "uuid": ("16s", 16),
}  # fmt: skip
_LENGTH_BYTES: Final = {"string": 2, "bytes": 4, "records": 4}  # before KIP-482; compact: 1


def read_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return the unsigned varint at a position, and the next position."""
    first = data[position]
    if first < 0x80:
        return first, position + 1
    return read_long_varint(data, position + 1, first)


def read_long_varint(data: bytes | memoryview, position: int, first: int) -> tuple[int, int]:
    """Return an unsigned varint whose first byte has its high bit set, and the next position."""
    value = first & 0x7F
    for shift in range(7, 7 * MAX_VARINT_BYTES, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > 0x7FFFFFFF:
                break
            return value, position
    raise ProtocolError("varint out of range", position=position)


def skip_tags(data: bytes | memoryview, position: int, count: int) -> int:
    """Return the position after a section of tagged fields; `count` is its first byte."""
    end = len(data)
    if count > 0x7F:
        count, position = read_long_varint(data, position, count)
    if count > TAGS_PER_SECTION_MAX:
        raise ProtocolError(f"{count} tagged fields in one section", position=position)
    if count * 2 > end - position:
        raise ProtocolError("more tagged fields than bytes", position=position)
    for _ in range(count):
        _, position = read_varint(data, position)
        size, position = read_varint(data, position)
        if size > end - position:
            raise ProtocolError("tagged field beyond the end", position=position)
        position += size
    return position


def varint(value: int) -> bytes:
    """Encode an unsigned varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def compile_decoder(body: Struct, version: int, flexible: bool) -> Decoder:
    """Return the decoder of a body: `decoder(data, position) -> message`."""
    maker = _DecoderSource(body.name, version, flexible)
    decoder: Decoder = maker.finish(body)
    return decoder


def compile_sliced_decoder(body: Struct, version: int, flexible: bool) -> SlicedDecoder:
    """Like `compile_decoder`, with pauses; the generator returns the message."""
    maker = _DecoderSource(body.name, version, flexible, sliced=True)
    decoder: SlicedDecoder = maker.finish(body)
    return decoder


def compile_encoder(body: Struct, version: int, flexible: bool) -> Encoder:
    """Return the encoder of a body: `encoder(append, message)` appends pieces of bytes.

    Values that do not fit their type raise struct.error, TypeError or AttributeError. Only the
    caller can cause them, not a peer.
    """
    maker = _EncoderSource(body.name, version, flexible)
    encoder: Encoder = maker.finish(body)
    return encoder


def compile_row_encoder(body: Struct, path: Sequence[str], version: int, flexible: bool) -> Encoder:
    """Return the encoder of one row of the array at a path of field names, for `SharedRows`."""
    maker = _EncoderSource(body.name, version, flexible)
    row = body
    for name in path:
        row = maker.child(next(field for field in row.fields if field.name == name))
    encoder: Encoder = maker.finish(row)
    return encoder


def compile_sliced_encoder(body: Struct, version: int, flexible: bool) -> SlicedEncoder:
    """Like `compile_encoder`, with pauses."""
    maker = _EncoderSource(body.name, version, flexible, sliced=True)
    encoder: SlicedEncoder = maker.finish(body)
    return encoder


class _Source:
    """The source of a function: its lines, its names, and fixed-size fields not yet written."""

    def __init__(self, root: str, version: int, flexible: bool, *, sliced: bool = False) -> None:
        self.root = root
        self.version = version
        self.flexible = flexible
        self.sliced = sliced
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.pending: list[tuple[str, str]] = []
        self._depth = 1
        self._variables = 0

    def add(self, line: str) -> None:
        self.lines.append("    " * self._depth + line)

    @contextmanager
    def block(self, line: str) -> Iterator[None]:
        self.add(line)
        self._depth += 1
        yield
        self._depth -= 1

    def variable(self, letter: str) -> str:
        self._variables += 1
        return f"{letter}{self._variables}"

    def present(self, body: Struct) -> tuple[list[Field], list[Field]]:
        """Return the plain and the tagged fields of this version, in wire order."""
        here = [field for field in body.fields if self.version in field.versions]
        tagged = [field for field in here if field.tag is not None]
        return [f for f in here if f.tag is None], sorted(tagged, key=lambda f: f.tag or 0)

    def nullable(self, field: Field) -> bool:
        return self.version in field.nullable

    def child(self, field: Field) -> Struct:
        return Struct(self.root + field.type, field.fields)

    def begin(self) -> None:
        """Begin a generator, even if the message has no array to pause in."""
        if self.sliced:
            self.add(f"rows = {ELEMENTS_PER_SLICE}")
            self.add("if False: yield")

    def pause(self) -> None:
        """Pause after an element if the slice is full."""
        if self.sliced:
            self.add("rows -= 1")
            with self.block("if rows <= 0:"):
                self.add(f"rows = {ELEMENTS_PER_SLICE}; yield")

    def run(self, head: str) -> Any:
        assert not self.pending
        source = "\n".join([head, *self.lines])
        made: dict[str, Any] = {}
        exec(compile(source, f"<{self.root} v{self.version}>", "exec"), self.names, made)
        return made["codec"]

    def packed(self, kind: str) -> tuple[str, str, int]:
        """Return the struct function for the pending fields: its name, operands and size."""
        layout = "".join(code for code, _ in self.pending)
        operands = ", ".join(operand for code, operand in self.pending if code != "x")
        name = f"{kind}_{layout.replace('?', 't')}"
        made = struct.Struct(f">{layout}")
        self.names[name] = made.unpack_from if kind == "unpack" else made.pack
        self.pending = []
        return name, operands, made.size


class _DecoderSource(_Source):
    """The source of `codec(data, p)`. n is a length, q an end, left the number of elements left."""

    def finish(self, body: Struct) -> Any:
        self.names |= {
            "new": object.__new__, "long": read_long_varint, "skip": skip_tags,
            "unpack_from": struct.unpack_from, "bad": self._bad, "many": self._many,
        }  # fmt: skip
        self.begin()
        self.add("end = len(data)")
        if not self.sliced:
            self.add(f"left = {MAX_ELEMENTS}")
        self.struct(body, "m")
        self.add("return m")
        return self.run("def codec(data, p, left):" if self.sliced else "def codec(data, p):")

    def _bad(self, subject: str, length: int, position: int) -> ProtocolError:
        return ProtocolError(f"{self.root}.{subject}: length {length} is wrong", position=position)

    def _many(self, subject: str, rows: int, position: int) -> RowLimitError:
        return RowLimitError(f"{self.root}.{subject}: {rows} rows are too many", position=position)

    def flush(self) -> None:
        if self.pending:
            name, targets, size = self.packed("unpack")
            self.add(f"{targets}, = {name}(data, p)")
            self.add(f"p += {size}")

    def length(self, old_bytes: int) -> None:
        """Read a length into n. Compact lengths are stored plus one, 0 is null (KIP-482)."""
        if not self.flexible:
            self.pending.append(("h" if old_bytes == 2 else "i", "n"))
            self.flush()
            return
        self.pending.append(("B", "n"))
        self.flush()
        with self.block("if n > 127:"):
            self.add("n, p = long(data, p, n)")
        self.add("n -= 1")

    def struct(self, body: Struct, target: str) -> None:
        self.names[f"C_{body.name}"] = CLASSES[body.name]
        self.add(f"{target} = new(C_{body.name})")
        plain, tagged = self.present(body)
        for field in body.fields:
            if field not in plain:
                self.add(f"{target}.{field.name} = {self._default(field)}")
        for field in plain:
            self.field(field, f"{target}.{field.name}")
        if self.flexible:
            self.pending.append(("B", "n"))
            self.flush()
            with self.block("if n:"):
                if self.sliced:
                    self.add("rows -= n")
                self.add("left -= n")
                with self.block("if left < 0:"):
                    self.add("raise many('tagged fields', n, p)")
                if tagged:
                    self._tags(tagged, target)
                else:
                    self.add("p = skip(data, p, n)")
        self.flush()

    def _default(self, field: Field) -> str:
        expression = default_expression(field)
        if expression is not None:
            return expression
        if field.is_array:
            return "[]"
        self.names[f"C_{self.root}{field.type}"] = CLASSES[self.root + field.type]
        return f"C_{self.root}{field.type}()"

    def _tags(self, tagged: list[Field], target: str) -> None:
        tag, stop = self.variable("t"), self.variable("e")
        with self.block("if n > 127:"):
            self.add("n, p = long(data, p, n)")
        with self.block(f"if n > {TAGS_PER_SECTION_MAX} or n * 2 > end - p:"):
            self.add("raise bad('tagged fields', n, p)")
        with self.block("for _ in range(n):"):
            for name in (tag, "n"):
                self.add(f"{name} = data[p]; p += 1")
                with self.block(f"if {name} > 127:"):
                    self.add(f"{name}, p = long(data, p, {name})")
            self.add(f"{stop} = p + n")
            with self.block(f"if {stop} > end:"):
                self.add("raise bad('tagged fields', n, p)")
            for field in tagged:
                with self.block(f"if {tag} == {field.tag}:"):
                    self.field(field, f"{target}.{field.name}")
                    self.flush()
                    # Otherwise one byte could be decoded many times.
                    with self.block(f"if p > {stop}:"):
                        self.add(f"raise bad({field.name!r}, n, p)")
            self.add(f"p = {stop}")

    def field(self, field: Field, target: str) -> None:
        if field.is_array:
            self._array(field, target)
        elif field.is_struct:
            self._nested(field, target)
        else:
            self.value(field, target)

    def value(self, field: Field, target: str) -> None:
        """Read one element of a primitive type."""
        if field.type in _FIXED:
            self.pending.append((_FIXED[field.type][0], target))
            return
        self.length(_LENGTH_BYTES[field.type])
        refuse = f"raise bad({field.name!r}, n, p)"
        used = "data[p:q].decode()" if field.type == "string" else "data[p:q]"
        if self.sliced and field.type == "string":
            used = "str(data[p:q], 'utf-8')"
        elif self.sliced and field.type == "bytes":
            used = "bytes(data[p:q])"
        longest = f" or n > {STRING_BYTES_MAX}" if field.type == "string" else ""
        if not field.is_array and self.nullable(field):
            with self.block("if n == -1:"):
                self.add(f"{target} = None")
            with self.block("else:"):
                self._take(target, used, refuse, longest)
        else:
            self._take(target, used, refuse, longest)

    def _take(self, target: str, used: str, refuse: str, longest: str) -> None:
        self.add("q = p + n")
        with self.block(f"if n < 0 or q > end{longest}:"):
            self.add(refuse)
        more_rows = f"; rows -= n // {BYTES_PER_ROW}" if self.sliced else ""
        self.add(f"{target} = {used}; p = q{more_rows}")

    def _nested(self, field: Field, target: str) -> None:
        name = self.variable("m")
        if not self.nullable(field):
            self.flush()
            self.struct(self.child(field), name)
            self.add(f"{target} = {name}")
            return
        # 1 if present; null is -1, but 0 in a tagged field.
        self.pending.append(("b", "n"))
        self.flush()
        with self.block("if n < 0:" if field.tag is None else "if n < 1:"):
            self.add(f"{target} = None")
        with self.block("else:"):
            self.struct(self.child(field), name)
            self.add(f"{target} = {name}")

    def _array(self, field: Field, target: str) -> None:
        self.length(4)
        if self.nullable(field):
            with self.block("if n == -1:"):
                self.add(f"{target} = None")
            with self.block("else:"):
                self._elements(field, target)
        else:
            self._elements(field, target)

    def _elements(self, field: Field, target: str) -> None:
        smallest = self.smallest(field)
        assert smallest > 0, field.name  # otherwise an announced length would cost no bytes
        with self.block(f"if n < 0 or n * {smallest} > end - p:"):
            self.add(f"raise bad({field.name!r}, n, p)")
        self.add("left -= n")
        with self.block("if left < 0:"):
            self.add(f"raise many({field.name!r}, n, p)")
        if field.type in _FIXED:
            code, size = _FIXED[field.type]
            assert len(code) == 1, "an array of uuids would need its own line"
            if self.sliced:
                self._sliced_numbers(target, code, size)
            else:
                self.add(f"{target} = list(unpack_from(f'>{{n}}{code}', data, p)); p += n * {size}")
            return
        items, item = self.variable("l"), self.variable("m")
        self.add(f"{items} = {target} = []")
        with self.block("for _ in range(n):"):
            if field.is_struct:
                self.struct(self.child(field), item)
            else:
                self.value(field, item)
            self.add(f"{items}.append({item})")
            self.pause()

    def _sliced_numbers(self, target: str, code: str, size: int) -> None:
        items, stop = self.variable("l"), self.variable("e")
        self.add(f"{items} = {target} = []; {stop} = p + n * {size}")
        with self.block(f"while p < {stop}:"):
            self.add(f"n = min({ELEMENTS_PER_SLICE}, ({stop} - p) // {size})")
            self.add(f"{items} += unpack_from(f'>{{n}}{code}', data, p); p += n * {size}")
            with self.block(f"if p < {stop}:"):
                self.add("yield")

    def smallest(self, field: Field, *, whole: bool = False) -> int:
        """Return the minimum size of an element of this field, or of the whole field."""
        if whole and field.is_array:
            return 1 if self.flexible else 4
        if whole and field.is_struct and self.nullable(field):
            return 1
        if field.is_struct:
            plain, _ = self.present(self.child(field))
            return sum(self.smallest(f, whole=True) for f in plain) + int(self.flexible)
        if field.type in _FIXED:
            return _FIXED[field.type][1]
        return 1 if self.flexible else _LENGTH_BYTES[field.type]


class _EncoderSource(_Source):
    """The source of `codec(w, m)`. s is the bytes to write, n their length."""

    def __init__(self, root: str, version: int, flexible: bool, *, sliced: bool = False) -> None:
        super().__init__(root, version, flexible, sliced=sliced)
        self.write = "w"

    def finish(self, body: Struct) -> Any:
        self.names |= {
            "varint": varint, "small": tuple(bytes((value,)) for value in range(128)),
            "join": b"".join, "pack": struct.pack, "SharedRows": SharedRows,
        }  # fmt: skip
        self.begin()
        self.struct(body, "m")
        self.flush()
        self.add("return")
        return self.run("def codec(w, m):")

    def flush(self) -> None:
        if self.pending:
            if all(code == "x" for code, _ in self.pending):
                self.add(f"{self.write}({bytes(len(self.pending))!r})")
                self.pending = []
                return
            name, operands, _ = self.packed("pack")
            self.add(f"{self.write}({name}({operands}))")

    def length(self, expression: str, old_bytes: int) -> None:
        """Write a length; `expression` is -1 for null."""
        if not self.flexible:
            self.pending.append(("h" if old_bytes == 2 else "i", expression))
            self.flush()
            return
        self.add(f"n = {expression} + 1")
        before = list(self.pending)
        with self.block("if n < 128:"):
            if before:
                self.pending.append(("B", "n"))
                self.flush()
            else:
                self.add(f"{self.write}(small[n])")
        with self.block("else:"):
            self.pending = before
            self.flush()
            self.add(f"{self.write}(varint(n))")

    def struct(self, body: Struct, source: str) -> None:
        plain, tagged = self.present(body)
        for field in plain:
            self.field(field, f"{source}.{field.name}")
        if not self.flexible:
            return
        if tagged:
            self.flush()
            self._tags(tagged, source)
        else:
            self.pending.append(("x", ""))

    def _tags(self, tagged: list[Field], source: str) -> None:
        """Write the tagged fields that differ from their default (KIP-482)."""
        tags = self.variable("t")
        outer = self.write
        self.add(f"{tags} = []")
        for field in tagged:
            value = f"{source}.{field.name}"
            with self.block(f"if {self._differs(field, value)}:"):
                parts, self.write = self.variable("b"), self.variable("w")
                self.add(f"{parts} = []; {self.write} = {parts}.append")
                self.field(field, value)
                self.flush()
                self.add(f"s = join({parts})")
                self.add(f"{tags}.append(varint({field.tag}) + varint(len(s)) + s)")
        self.write = outer
        self.add(f"{outer}(varint(len({tags})) + join({tags}))")

    def _differs(self, field: Field, value: str) -> str:
        if field.is_array:
            return value
        if field.is_struct and field.is_nullable:
            return "True"  # without the field, Kafka reads an empty structure instead of null
        if field.is_struct:
            name = f"default_{field.name}"
            self.names[name] = CLASSES[self.root + field.type]()
            return f"{value} != {name}"
        return f"{value} is not None" if field.default is None else f"{value} != {field.default!r}"

    def field(self, field: Field, source: str) -> None:
        if field.is_array:
            self._array(field, source)
        elif field.is_struct:
            self._nested(field, source)
        else:
            self.value(field, source)

    def value(self, field: Field, source: str) -> None:
        """Write one element of a primitive type."""
        if field.type in _FIXED:
            self.pending.append((_FIXED[field.type][0], source))
            return
        encoded = f"{source}.encode()" if field.type == "string" else source
        name = self.variable("s")
        if not field.is_array and self.nullable(field):
            self.add(f"{name} = b'' if {source} is None else {encoded}")
            length = f"(-1 if {source} is None else len({name}))"
        else:
            self.add(f"{name} = {encoded}")
            length = f"len({name})"
        self.length(length, _LENGTH_BYTES[field.type])
        more_rows = f"; rows -= len({name}) // {BYTES_PER_ROW}" if self.sliced else ""
        self.add(f"{self.write}({name}){more_rows}")

    def _nested(self, field: Field, source: str) -> None:
        if not self.nullable(field):
            self.struct(self.child(field), source)
            return
        self.flush()
        with self.block(f"if {source} is None:"):
            null = b"\xff" if field.tag is None else b"\x00"
            self.add(f"{self.write}({null!r})")
        with self.block("else:"):
            self.add(f"{self.write}(b'\\x01')")
            self.struct(self.child(field), source)
            self.flush()

    def _array(self, field: Field, source: str) -> None:
        items = self.variable("l")
        self.add(f"{items} = {source}")
        if self.nullable(field):
            self.length(f"(-1 if {items} is None else len({items}))", 4)
            with self.block(f"if {items}:"):
                self._elements(field, items)
        else:
            self.length(f"len({items})", 4)
            self._elements(field, items)

    def _elements(self, field: Field, items: str) -> None:
        if field.type in _FIXED:
            code = _FIXED[field.type][0]
            self.add(f"{self.write}(pack(f'>{{len({items})}}{code}', *{items}))")
            return
        if self.root + field.type not in SHARED_ROWS:
            self._loop(field, items)
            return
        with self.block(f"if type({items}) is SharedRows:"):
            self.add(f"{self.write}({items}.encoded[{self.version}])")
        with self.block("else:"):
            self._loop(field, items)

    def _loop(self, field: Field, items: str) -> None:
        item = self.variable("m")
        with self.block(f"for {item} in {items}:"):
            if field.is_struct:
                self.struct(self.child(field), item)
            else:
                self.value(field, item)
            self.flush()
            self.pause()
