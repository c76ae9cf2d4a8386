// Avro 1.12: a schema becomes a function that reads a value.

import { hex, shown } from "./wire.js";

const PRIMITIVES = {
  null: () => null,
  boolean: (reader) => reader.take(1)[0] !== 0,
  int: (reader) => shown(reader.zigzag()),
  long: (reader) => shown(reader.zigzag()),
  float: (reader) => shown(reader.fixed("getFloat32", 4)),
  double: (reader) => shown(reader.fixed("getFloat64", 8)),
  bytes: (reader) => hex(reader.take(Number(reader.zigzag()))),
  string: (reader) => reader.string(Number(reader.zigzag())),
};

// Returns (reader) => value for the text of a schema.
export function avro(schemaText) {
  const read = compile(JSON.parse(schemaText), "", new Map());
  return (reader) => read(reader, 0);
}

function compile(schema, space, names) {
  if (typeof schema === "string") return named(schema, space, names);
  if (Array.isArray(schema)) return union(schema.map((branch) => compile(branch, space, names)));
  switch (schema.type) {
    case "record":
    case "error":
      return record(schema, space, names);
    case "enum":
      return define(schema, space, names, () => (reader) => schema.symbols[Number(reader.zigzag())] ?? null);
    case "fixed":
      return define(schema, space, names, () => (reader) => hex(reader.take(schema.size)));
    case "array":
      return array(compile(schema.items, space, names));
    case "map":
      return map(compile(schema.values, space, names));
    default:
      return logical(schema, compile(schema.type, space, names));
  }
}

function named(name, space, names) {
  if (Object.hasOwn(PRIMITIVES, name)) {
    return (reader, depth) => {
      reader.enter(depth);
      return PRIMITIVES[name](reader);
    };
  }
  const type = names.get(name.includes(".") || !space ? name : `${space}.${name}`) || names.get(name);
  if (!type) throw new Error(`the schema has no type ${name}`);
  return (reader, depth) => type.read(reader, depth);
}

// Defines a named type, of which its own fields may be.
function define(schema, space, names, build) {
  const isFull = schema.name.includes(".");
  const inner = isFull ? schema.name.slice(0, schema.name.lastIndexOf(".")) : (schema.namespace ?? space);
  const type = {};
  names.set(isFull || !inner ? schema.name : `${inner}.${schema.name}`, type);
  const read = build(inner);
  type.read = (reader, depth) => {
    reader.enter(depth);
    return read(reader, depth);
  };
  return type.read;
}

function record(schema, space, names) {
  return define(schema, space, names, (inner) => {
    const fields = schema.fields.map((field) => [field.name, compile(field.type, inner, names)]);
    return (reader, depth) => {
      const value = Object.create(null); // so that no name has a meaning
      for (const [name, read] of fields) value[name] = read(reader, depth + 1);
      return value;
    };
  });
}

function union(branches) {
  return (reader, depth) => {
    const read = branches[Number(reader.zigzag())];
    if (!read) throw new Error("it has a branch of a union that the schema lacks");
    return read(reader, depth);
  };
}

// Calls `item` for each item of the blocks of an array or a map.
function blocks(reader, item) {
  for (;;) {
    let count = reader.zigzag();
    if (count === 0n) return;
    if (count < 0n) {
      count = -count;
      reader.zigzag(); // the bytes of the block
    }
    for (; count > 0n; count -= 1n) item();
  }
}

function array(read) {
  return (reader, depth) => {
    const values = [];
    blocks(reader, () => values.push(read(reader, depth + 1)));
    return values;
  };
}

function map(read) {
  return (reader, depth) => {
    const values = Object.create(null);
    blocks(reader, () => {
      const key = reader.string(Number(reader.zigzag()));
      values[key] = read(reader, depth + 1);
    });
    return values;
  };
}

function logical(schema, read) {
  const milliseconds = { date: 86_400_000, "timestamp-millis": 1, "timestamp-micros": 0.001 }[schema.logicalType];
  if (milliseconds === undefined) return read;
  return (reader, depth) => {
    const value = read(reader, depth);
    const time = new Date(value * milliseconds);
    if (Number.isNaN(time.getTime())) return value;
    return schema.logicalType === "date" ? time.toISOString().slice(0, 10) : time.toISOString();
  };
}
