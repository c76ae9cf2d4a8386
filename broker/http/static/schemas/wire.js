// Bytes that any client may have written: a reader that ends with an error instead of running on.

const VALUES_MAX = 20_000; // of one record: more than a person reads
const DEPTH_MAX = 64;
const SAFE = BigInt(Number.MAX_SAFE_INTEGER);
const text = new TextDecoder("utf-8", { fatal: false });

export class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.at = 0;
    this.left = VALUES_MAX;
  }

  get isAtEnd() {
    return this.at >= this.bytes.length;
  }

  // Counts one value at a depth.
  enter(depth) {
    if (depth > DEPTH_MAX) throw new Error("it is nested too deeply");
    if ((this.left -= 1) < 0) throw new Error("it has too many values");
  }

  take(count) {
    if (!(count >= 0 && count <= this.bytes.length - this.at)) throw new Error("it ends too early");
    this.at += count;
    return this.bytes.subarray(this.at - count, this.at);
  }

  // An unsigned varint as a BigInt of 64 bits.
  varint() {
    let value = 0n;
    for (let shift = 0n; shift < 70n; shift += 7n) {
      const [byte] = this.take(1);
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return BigInt.asUintN(64, value);
    }
    throw new Error("a number is too long");
  }

  // A varint with the sign in its lowest bit.
  zigzag() {
    const value = this.varint();
    return (value >> 1n) ^ -(value & 1n);
  }

  size() {
    return Number(this.varint());
  }

  // A little-endian number of the method `kind` of DataView.
  fixed(kind, count) {
    const at = this.at;
    this.take(count);
    return this.view[kind](at, true);
  }

  string(count) {
    return text.decode(this.take(count));
  }
}

// A number that JSON can show: text, if a double would not have all its digits.
export function shown(value) {
  if (typeof value !== "bigint") return Number.isFinite(value) ? value : String(value);
  return value <= SAFE && value >= -SAFE ? Number(value) : value.toString();
}

export function hex(bytes) {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join(" ");
}

export function fromBase64(encoded) {
  return Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0));
}
