// The partitions of a topic or a view, and which of them Kafka's default partitioner gives a key.

import { get } from "../api.js";

const SUFFIX = ".compacted"; // of the names of views
const ROWS_MAX = 5000; // that the broker lists at once

// The topic of a view with this name, which may not exist; null for other names.
export function baseOf(name) {
  return name.endsWith(SUFFIX) ? name.slice(0, -SUFFIX.length) : null;
}

export function viewOf(topic) {
  return topic + SUFFIX;
}

// The served partitions as rows with `partition` and `log_end_offset`, how many partitions there are, and of
// a view the topic that it belongs to. A topic that has the name of a view takes precedence, so the other
// topic has no view then.
export async function partitionsOf(name, limit = ROWS_MAX) {
  const base = baseOf(name);
  const list = (path, topic) => get(`/api/v1/${path}?limit=${limit}&topic=${encodeURIComponent(topic)}`);
  const views = base === null ? [] : await list("view", base).then((answer) => answer.views, () => []);
  if (views.length) return { rows: views, count: views.length, base };
  const answer = await list("cleaner/partitions", name);
  return { rows: answer.partitions, count: answer.partition_count, base: null };
}

// The partition that Kafka's default partitioner (murmur2) gives a key.
export function partitionOfKey(key, count) {
  return (murmur2(new TextEncoder().encode(key)) & 0x7fffffff) % count;
}

// As in org.apache.kafka.common.utils.Utils: a signed integer of 32 bits.
export function murmur2(data) {
  const M = 0x5bd1e995;
  const length = data.length;
  const words = new DataView(data.buffer, data.byteOffset, length);
  const rest = length & ~3;
  let h = 0x9747b28c ^ length;
  for (let at = 0; at < rest; at += 4) {
    const k = Math.imul(words.getInt32(at, true), M);
    h = Math.imul(h, M) ^ Math.imul(k ^ (k >>> 24), M);
  }
  if (length > rest) {
    for (let at = length - 1; at >= rest; at -= 1) h ^= data[at] << (8 * (at - rest));
    h = Math.imul(h, M);
  }
  h = Math.imul(h ^ (h >>> 13), M);
  return h ^ (h >>> 15);
}
