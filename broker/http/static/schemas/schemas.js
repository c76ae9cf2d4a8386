// Keys and values with a schema of the registry: a zero byte, the number of the schema in four bytes, and
// the data. The broker fetches the schema; this tab decodes, so a hostile record harms nothing else.

import { get } from "../api.js";
import { avro } from "./avro.js";
import { protobuf } from "./protobuf.js";
import { Reader, fromBase64 } from "./wire.js";

const HEAD = 5;
const SCHEMAS_MAX = 100; // that a tab asks for: a topic may have a number in every record
const schemas = new Map(); // path -> promise of a function that reads a value
let hasRegistry = true; // until the broker says that there is none

// Returns what a key or value is in JSON: { text, schema }; null if it has no schema. Throws if it
// cannot be decoded.
export async function decoded(topic, row, name) {
  if (!hasRegistry || row[name] === null || row.truncated.includes(name)) return null;
  const bytes = typeof row[name] === "string" ? new TextEncoder().encode(row[name]) : fromBase64(row[`${name}_base64`]);
  if (bytes.length < HEAD || bytes[0] !== 0) return null;
  const number = new DataView(bytes.buffer).getInt32(1);
  if (number < 0) return null;
  const path = `/api/v1/topics/${encodeURIComponent(topic)}/schemas/${number}`;
  if (!schemas.has(path)) {
    if (schemas.size >= SCHEMAS_MAX) return null;
    schemas.set(path, get(path).then(readerOf));
  }
  try {
    const { kind, read } = await schemas.get(path);
    const reader = new Reader(bytes.subarray(HEAD));
    const text = read(reader);
    if (!reader.isAtEnd) throw new Error("more bytes follow the value");
    return { text, schema: `${kind} schema ${number}` };
  } catch (error) {
    if (error.status === 409) hasRegistry = false;
    if (error.status === 409 || error.status === 404) return null; // these bytes are something else
    if (error.status !== undefined) schemas.delete(path); // it may be there the next time
    throw new Error(`not decoded with schema ${number}: ${error.message}`);
  }
}

// What returns a value in JSON.
function readerOf({ type, schemas: texts }) {
  const written = (read) => (reader) => JSON.stringify(read(reader));
  if (type === "AVRO") return { kind: "Avro", read: written(avro(texts[0])) };
  if (type === "PROTOBUF") return { kind: "Protobuf", read: written(protobuf(texts)) };
  return { kind: type, read: json };
}

// The text as it is: to write the parsed value would change large numbers.
function json(reader) {
  const text = reader.string(reader.bytes.length - reader.at);
  JSON.parse(text);
  return text;
}
