// Data: unpacks what packing.py has packed. The result is the JSON of a branch in which every
// {"$": [type, offset, shape]} is replaced by a typed array with a `shape`.

const Data = (() => {
  const TYPES = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };

  /** The facts of the report that are known without unpacking: generations, findings, keys. */
  const head = JSON.parse(document.getElementById("report").textContent);
  const unpacked = new Map();

  /** Returns the contents of a branch, a promise; each branch is unpacked once. */
  function branch(generation, number) {
    const id = `packed-${generation}-${number}`;
    if (!unpacked.has(id)) unpacked.set(id, unpack(document.getElementById(id).textContent));
    return unpacked.get(id);
  }

  async function unpack(text) {
    const packed = Uint8Array.from(atob(text.trim()), (char) => char.charCodeAt(0));
    const bytes = await inflate(packed);
    const length = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
    const json = new TextDecoder().decode(bytes.subarray(4, 4 + length));
    const start = Math.ceil((4 + length) / 8) * 8;
    return JSON.parse(json, (_, value) => {
      if (!value || !Array.isArray(value.$)) return value;
      const [type, offset, shape] = value.$;
      const size = shape.reduce((product, each) => product * each, 1);
      const array = new TYPES[type](bytes.buffer, bytes.byteOffset + start + offset, size);
      array.shape = shape;
      return array;
    });
  }

  /** Undoes raw DEFLATE: by the browser, or in this script where the browser cannot. */
  async function inflate(packed) {
    if (typeof DecompressionStream === "function") {
      let stream = null;
      try {
        stream = new DecompressionStream("deflate-raw");
      } catch {
        return inflateInScript(packed); // a browser that knows only zlib and gzip
      }
      const whole = new Response(new Blob([packed]).stream().pipeThrough(stream));
      return new Uint8Array(await whole.arrayBuffer());
    }
    return inflateInScript(packed);
  }

  // -- DEFLATE, RFC 1951 --------------------------------------------------------------------------

  const LENGTH_BASE = [3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83,
    99, 115, 131, 163, 195, 227, 258];
  const LENGTH_BITS = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5,
    5, 0];
  const DISTANCE_BASE = [1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769,
    1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577];
  const CODE_ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

  function inflateInScript(source) {
    let at = 0, bits = 0, held = 0, size = 0;
    let out = new Uint8Array(Math.max(source.length * 8, 1024));

    function read(n) {
      while (held < n) {
        bits |= source[at++] << held;
        held += 8;
      }
      const value = bits & ((1 << n) - 1);
      bits >>>= n;
      held -= n;
      return value;
    }

    function symbol(table) {
      let code = 0, first = 0, index = 0;
      for (let length = 1; length < 16; length++) {
        code |= read(1);
        const count = table.counts[length];
        if (code - first < count) return table.symbols[index + code - first];
        index += count;
        first = (first + count) << 1;
        code <<= 1;
      }
      throw new Error("The data of this report are damaged.");
    }

    function reserve(n) {
      if (size + n <= out.length) return;
      const larger = new Uint8Array(Math.max(out.length * 2, size + n));
      larger.set(out);
      out = larger;
    }

    function copyStored() {
      bits = held = 0;
      const length = source[at] | (source[at + 1] << 8);
      at += 4;
      reserve(length);
      out.set(source.subarray(at, at + length), size);
      at += length;
      size += length;
    }

    function copyBlock(lengths, distances) {
      for (;;) {
        const value = symbol(lengths);
        if (value === 256) return;
        reserve(258);
        if (value < 256) {
          out[size++] = value;
          continue;
        }
        const length = LENGTH_BASE[value - 257] + read(LENGTH_BITS[value - 257]);
        const code = symbol(distances);
        const distance = DISTANCE_BASE[code] + read(code < 2 ? 0 : (code >> 1) - 1);
        for (let i = 0; i < length; i++, size++) out[size] = out[size - distance];
      }
    }

    function readTables() {
      const nLengths = read(5) + 257, nDistances = read(5) + 1, nCodes = read(4) + 4;
      const own = new Uint8Array(19);
      for (let i = 0; i < nCodes; i++) own[CODE_ORDER[i]] = read(3);
      const codes = huffman(own), lengths = new Uint8Array(nLengths + nDistances);
      for (let i = 0; i < lengths.length; ) {
        const value = symbol(codes);
        if (value < 16) {
          lengths[i++] = value;
          continue;
        }
        const repeated = value === 16 ? lengths[i - 1] : 0;
        const times = value === 16 ? 3 + read(2) : value === 17 ? 3 + read(3) : 11 + read(7);
        lengths.fill(repeated, i, i + times);
        i += times;
      }
      return [huffman(lengths.subarray(0, nLengths)), huffman(lengths.subarray(nLengths))];
    }

    for (let isLast = 0; !isLast; ) {
      isLast = read(1);
      const kind = read(2);
      if (kind === 0) copyStored();
      else if (kind === 1) copyBlock(...fixedTables());
      else copyBlock(...readTables());
    }
    return out.slice(0, size);
  }

  function huffman(lengths) {
    const counts = new Uint16Array(16), offsets = new Uint16Array(16);
    for (const length of lengths) counts[length]++;
    counts[0] = 0;
    for (let i = 1; i < 15; i++) offsets[i + 1] = offsets[i] + counts[i];
    const symbols = new Uint16Array(lengths.length);
    lengths.forEach((length, value) => {
      if (length) symbols[offsets[length]++] = value;
    });
    return { counts, symbols };
  }

  function fixedTables() {
    const lengths = new Uint8Array(288).fill(8);
    lengths.fill(9, 144, 256);
    lengths.fill(7, 256, 280);
    return [huffman(lengths), huffman(new Uint8Array(30).fill(5))];
  }

  return { head, branch };
})();
