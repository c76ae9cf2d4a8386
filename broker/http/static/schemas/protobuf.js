// Protocol Buffers (proto2 and proto3), with file descriptors as the schema.

import { Reader, fromBase64, hex, shown } from "./wire.js";

const VARINT = 0;
const FIXED64 = 1;
const BYTES = 2;
const FIXED32 = 5;
const REPEATED = 3; // a label
const [ENUM, MESSAGE] = [14, 11]; // types of fields
// Types of fields by number: how to read one value.
const SCALARS = {
  1: (reader) => shown(reader.fixed("getFloat64", 8)),
  2: (reader) => shown(reader.fixed("getFloat32", 4)),
  3: (reader) => shown(BigInt.asIntN(64, reader.varint())),
  4: (reader) => shown(reader.varint()),
  5: (reader) => Number(BigInt.asIntN(32, reader.varint())),
  6: (reader) => shown(reader.fixed("getBigUint64", 8)),
  7: (reader) => reader.fixed("getUint32", 4),
  8: (reader) => reader.varint() !== 0n,
  9: (reader) => reader.string(reader.size()),
  12: (reader) => hex(reader.take(reader.size())),
  13: (reader) => Number(BigInt.asUintN(32, reader.varint())),
  15: (reader) => reader.fixed("getInt32", 4),
  16: (reader) => shown(reader.fixed("getBigInt64", 8)),
  17: (reader) => Number(BigInt.asIntN(32, reader.zigzag())),
  18: (reader) => shown(reader.zigzag()),
};

// Returns (reader) => value for file descriptors in base64. The bytes begin with the indexes of the
// message in the first file.
export function protobuf(descriptors) {
  const types = new Map();
  const files = descriptors.map((encoded) => file(fromBase64(encoded), types));
  return (reader) => {
    const count = Number(reader.zigzag());
    let message = { nested: files[0] };
    for (let left = count || 1; left > 0; left -= 1) {
      message = message.nested[count ? Number(reader.zigzag()) : 0];
      if (!message || left > 64) throw new Error("the schema has no such message");
    }
    return readMessage(reader, message, types, 0);
  };
}

// Descriptors ----------------------------------------------------------------------------------

// The fields of a message by number: numbers as BigInt, everything else as bytes.
function fieldsOf(bytes) {
  const reader = new Reader(bytes);
  const fields = new Map();
  while (!reader.isAtEnd) {
    const tag = reader.size();
    if (!fields.has(tag >>> 3)) fields.set(tag >>> 3, []);
    fields.get(tag >>> 3).push(readRaw(reader, tag & 7));
  }
  return fields;
}

function readRaw(reader, wire) {
  if (wire === VARINT) return reader.varint();
  if (wire === FIXED64) return reader.take(8);
  if (wire === FIXED32) return reader.take(4);
  if (wire === BYTES) return reader.take(reader.size());
  throw new Error("it has a group, which is not supported");
}

function textOf(fields, number) {
  const [bytes] = fields.get(number) || [];
  return bytes ? new TextDecoder().decode(bytes) : "";
}

function numberOf(fields, number) {
  return Number((fields.get(number) || [0n])[0]);
}

// Adds the types of a file, and returns its messages.
function file(bytes, types) {
  const fields = fieldsOf(bytes);
  const space = textOf(fields, 2);
  for (const each of fields.get(5) || []) enumeration(each, space, types);
  return (fields.get(4) || []).map((each) => messageType(each, space, types));
}

function messageType(bytes, space, types) {
  const fields = fieldsOf(bytes);
  const name = `${space ? `${space}.` : ""}${textOf(fields, 1)}`;
  const nested = (fields.get(3) || []).map((each) => messageType(each, name, types));
  for (const each of fields.get(4) || []) enumeration(each, name, types);
  const [options] = fields.get(7) || [];
  const members = new Map((fields.get(2) || []).map((each) => member(fieldsOf(each))));
  const type = { nested, members, isEntry: Boolean(options && numberOf(fieldsOf(options), 7)) };
  types.set(`.${name}`, type);
  return type;
}

function member(fields) {
  const isRepeated = numberOf(fields, 4) === REPEATED;
  return [numberOf(fields, 3), { name: textOf(fields, 1), type: numberOf(fields, 5), typeName: textOf(fields, 6), isRepeated }];
}

function enumeration(bytes, space, types) {
  const fields = fieldsOf(bytes);
  const values = (fields.get(2) || []).map(fieldsOf);
  const names = new Map(values.map((value) => [Number(BigInt.asIntN(32, (value.get(2) || [0n])[0])), textOf(value, 1)]));
  types.set(`.${space ? `${space}.` : ""}${textOf(fields, 1)}`, { names });
}

// Messages -------------------------------------------------------------------------------------

function readMessage(reader, type, types, depth) {
  const value = Object.create(null); // so that no name has a meaning
  while (!reader.isAtEnd) {
    reader.enter(depth);
    const tag = reader.size();
    const wire = tag & 7;
    const field = type.members.get(tag >>> 3);
    if (!field) {
      const raw = readRaw(reader, wire);
      value[`#${tag >>> 3}`] = typeof raw === "bigint" ? shown(raw) : hex(raw);
    } else if (field.isRepeated) repeated(reader, field, wire, types, depth, value);
    else value[field.name] = readValue(reader, field, types, depth);
  }
  return value;
}

function repeated(reader, field, wire, types, depth, value) {
  const isPacked = wire === BYTES && ![9, MESSAGE, 12].includes(field.type);
  const part = isPacked ? partOf(reader) : reader;
  do {
    if (isPacked && part.isAtEnd) break;
    part.enter(depth);
    const one = readValue(part, field, types, depth);
    if (field.type === MESSAGE && types.get(field.typeName)?.isEntry) {
      value[field.name] ??= Object.create(null);
      value[field.name][one.key ?? ""] = one.value ?? null;
    } else (value[field.name] ??= []).push(one);
  } while (isPacked);
  if (isPacked) reader.left = part.left;
}

// A reader of the next bytes, which are as many as the number before them.
function partOf(reader) {
  const part = new Reader(reader.take(reader.size()));
  part.left = reader.left;
  return part;
}

function readValue(reader, field, types, depth) {
  if (field.type === ENUM) {
    const number = Number(BigInt.asIntN(32, reader.varint()));
    return types.get(field.typeName)?.names?.get(number) ?? number;
  }
  if (field.type !== MESSAGE) {
    const read = SCALARS[field.type];
    if (!read) throw new Error("it has a group, which is not supported");
    return read(reader);
  }
  const part = partOf(reader);
  const type = types.get(field.typeName) || wellKnown(field.typeName);
  const value = type ? readMessage(part, type, types, depth + 1) : hex(part.bytes);
  reader.left = part.left;
  return type?.finish ? type.finish(value) : value;
}

// Types that every compiler knows, and registries do not list.
function wellKnown(name) {
  const seconds = { name: "seconds", type: 3 };
  const members = new Map([[1, seconds], [2, { name: "nanos", type: 5 }]]);
  if (name === ".google.protobuf.Timestamp") return { members, finish: timestamp };
  if (name === ".google.protobuf.Duration") return { members };
  return null;
}

function timestamp({ seconds = 0, nanos = 0 }) {
  const time = new Date(Number(seconds) * 1000 + nanos / 1e6);
  return Number.isNaN(time.getTime()) ? { seconds, nanos } : time.toISOString();
}
