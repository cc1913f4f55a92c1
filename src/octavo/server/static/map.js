// Reads the frames of octavo.inspect.feed (see its docstring for the format) and keeps a bounded history of them.
// Knows no page: what is drawn where is the business of the other modules.

export const FEED_VERSION = 1;
export const FREE = 102, CACHED = 99, USED = 117, SHARED = 115, PENDING = 112; // letters f c u s p
export const STATE_NAMES = { [FREE]: "free", [CACHED]: "cached", [USED]: "used", [SHARED]: "shared", [PENDING]: "pending" };

/** State of every block and sequence after the frames applied so far. */
export class BlockMap {
  /** Apply one frame; returns the set of blocks that look different now, or null: all of them may. */
  apply(frame) {
    if (frame.v !== FEED_VERSION) throw new Error(`feed version ${frame.v}: this page reads version ${FEED_VERSION}; reload it`);
    const full = "pool" in frame;
    if (full) this.#begin(frame.pool);
    else if (frame.frame !== this.frame + 1) throw new Error(`frame ${frame.frame} does not fit on frame ${this.frame}`);
    const changed = new Set();
    this.frame = frame.frame;
    this.step = frame.step;
    this.time = frame.time;
    this.#setBlocks(frame.blocks, changed);
    this.#setKeys(frame.keys);
    for (const id of frame.gone) this.#drop(id, changed);
    for (const [id, request, index, promptLen] of frame.new) {
      const tables = this.windows.map(() => []);
      this.sequences.set(id, { id, request, index, promptLen, tokens: 0, computed: 0, lastStep: 0, tables });
    }
    const reached = this.#setProgress(frame.progress);
    for (const [id, group, first, ...ids] of frame.tables) this.#setTail(this.sequences.get(id), group, first, ids, changed);
    this.#refill(reached, changed);
    if (frame.waiting !== null) this.waiting = frame.waiting;
    this.stats = frame.stats;
    return full ? null : changed;
  }

  #begin(pool) {
    this.pool = pool;
    this.numBlocks = pool.num_blocks;
    this.blockSize = pool.block_size;
    this.windows = pool.windows;
    this.states = new Uint8Array(this.numBlocks).fill(FREE);
    this.lastUsed = new Int32Array(this.numBlocks);
    this.fills = new Uint16Array(this.numBlocks);
    this.owners = new Array(this.numBlocks);
    this.keys = new Map();
    this.byHash = new Map();
    this.sequences = new Map();
    this.waiting = [];
    this.statIndex = Object.fromEntries(pool.stats.map((name, i) => [name, i]));
  }

  #setBlocks([ids, states, at], changed) {
    for (let i = 0; i < ids.length; i++) {
      const block = ids[i], state = states.charCodeAt(i);
      this.states[block] = state;
      this.lastUsed[block] = at[i];
      if (state === CACHED) this.fills[block] = this.blockSize;
      else if (state === FREE || state === PENDING) this.fills[block] = 0;
      changed.add(block);
    }
  }

  #setKeys(rows) {
    for (let i = 0; i < rows.length; i += 4) {
      const block = rows[i], old = this.keys.get(block);
      if (old) this.byHash.delete(old.group + old.hash);
      if (rows[i + 1] < 0) this.keys.delete(block);
      else {
        const key = { group: rows[i + 1], hash: rows[i + 2], parent: rows[i + 3] };
        this.keys.set(block, key);
        this.byHash.set(key.group + key.hash, block);
      }
    }
  }

  #setProgress(rows) {
    const reached = [];
    for (let i = 0; i < rows.length; i += 4) {
      const seq = this.sequences.get(rows[i]);
      reached.push([seq, Math.floor(Math.min(seq.computed, rows[i + 2]) / this.blockSize)]);
      [seq.tokens, seq.computed, seq.lastStep] = [rows[i + 1], rows[i + 2], rows[i + 3]];
    }
    return reached;
  }

  #setTail(seq, group, first, ids, changed) {
    const table = seq.tables[group];
    for (let logical = first; logical < table.length; logical++) this.#disown(table[logical], seq.id, group, changed);
    table.length = first;
    for (const block of ids) {
      if (block >= 0) {
        (this.owners[block] ??= []).push({ seq: seq.id, group, logical: table.length });
        changed.add(block);
      }
      table.push(block);
    }
  }

  #drop(id, changed) {
    const seq = this.sequences.get(id);
    seq.tables.forEach((table, group) => table.forEach((block) => this.#disown(block, id, group, changed)));
    this.sequences.delete(id);
  }

  #disown(block, seq, group, changed) {
    if (block < 0) return;
    this.owners[block] = this.owners[block].filter((o) => o.seq !== seq || o.group !== group);
    changed.add(block);
  }

  #refill(reached, changed) {
    for (const [seq, first] of reached)
      for (const table of seq.tables)
        for (let i = first; i < table.length && i * this.blockSize < seq.computed; i++) if (table[i] >= 0) changed.add(table[i]);
    for (const block of changed) {
      if (!this.owners[block]?.length) continue;
      let fill = 0;
      for (const o of this.owners[block]) fill = Math.max(fill, this.sequences.get(o.seq).computed - o.logical * this.blockSize);
      this.fills[block] = Math.min(fill, this.blockSize);
    }
  }

  ownersOf(block) {
    return this.owners[block] ?? [];
  }

  stat(name) {
    return this.stats[this.statIndex[name]];
  }

  /** Steps since the block was read or written; null: never. */
  age(block) {
    const owners = this.ownersOf(block);
    const at = owners.length ? Math.max(...owners.map((o) => this.sequences.get(o.seq).lastStep)) : this.lastUsed[block];
    return at ? this.step - at : null;
  }

  /** {hash, parent, block of the parent or undefined} of published content. */
  keyOf(block) {
    const key = this.keys.get(block);
    return key && { ...key, parentBlock: this.byHash.get(key.group + key.parent) };
  }

  /** Bytes by kind, over the whole pool, and what sharing saves and static allocation would hold for these sequences. */
  waste() {
    const perBlock = this.pool.bytes_per_block, slot = perBlock / this.blockSize;
    let filled = 0, blocksUsed = 0, saved = 0;
    for (let block = 0; block < this.numBlocks; block++) {
      if (this.states[block] !== USED && this.states[block] !== SHARED) continue;
      blocksUsed++;
      filled += this.fills[block];
      saved += this.owners[block].length - 1;
    }
    const perSequence = Math.ceil(this.pool.max_model_len / this.blockSize) * this.windows.length * perBlock;
    return {
      filled: filled * slot,
      fragmented: blocksUsed * perBlock - filled * slot,
      cached: this.stat("cached") * perBlock,
      pending: this.stat("pending") * perBlock,
      free: this.stat("free") * perBlock,
      used: blocksUsed * perBlock,
      total: this.numBlocks * perBlock,
      sharedSaved: saved * perBlock,
      static: this.sequences.size * perSequence,
      staticSequences: Math.floor((this.numBlocks * perBlock) / perSequence),
    };
  }

  /** The same state as one full frame: what history starts from when it goes back. */
  toFrame() {
    const ids = [], letters = [], at = [], keys = [], progress = [], tables = [], rows = [];
    for (let block = 0; block < this.numBlocks; block++) {
      if (this.states[block] === FREE && !this.lastUsed[block]) continue;
      ids.push(block);
      letters.push(String.fromCharCode(this.states[block]));
      at.push(this.lastUsed[block]);
    }
    for (const [block, key] of this.keys) keys.push(block, key.group, key.hash, key.parent);
    for (const seq of this.sequences.values()) {
      rows.push([seq.id, seq.request, seq.index, seq.promptLen]);
      progress.push(seq.id, seq.tokens, seq.computed, seq.lastStep);
      seq.tables.forEach((table, group) => tables.push([seq.id, group, 0, ...table]));
    }
    return {
      v: FEED_VERSION, frame: this.frame, step: this.step, time: this.time, pool: this.pool, blocks: [ids, letters.join(""), at],
      keys, new: rows, gone: [], progress, tables, waiting: this.waiting, events: [], missed: 0, stats: this.stats,
    };
  }
}

const KEY_EVERY = 64; // frames between two places where history can start

/** Frames in order; the oldest are dropped. Positions count from 0 at the first frame ever pushed. */
export class History {
  constructor({ maxFrames = 4000, maxBytes = 48e6 } = {}) {
    Object.assign(this, { maxFrames, maxBytes, frames: [], sizes: [], starts: new Map(), first: 0, bytes: 0 });
    this.head = new BlockMap(); // the state after the newest frame
  }

  get length() {
    return this.frames.length;
  }

  get last() {
    return this.first + this.frames.length - 1;
  }

  at(position) {
    return this.frames[position - this.first];
  }

  /** Append a frame of about `size` characters; returns what `BlockMap.apply` does. */
  push(frame, size = 2000) {
    const changed = this.head.apply(frame);
    this.frames.push(frame);
    this.sizes.push(size);
    this.bytes += size;
    if (changed === null) this.starts.set(this.last, frame);
    else if (this.last % KEY_EVERY === 0) this.starts.set(this.last, this.head.toFrame());
    this.#trim();
    return changed;
  }

  #trim() {
    if (this.frames.length <= this.maxFrames && this.bytes <= this.maxBytes) return;
    const next = [...this.starts.keys()].filter((p) => p > this.first).sort((a, b) => a - b)[0];
    if (next === undefined) return;
    this.starts.delete(this.first);
    for (const size of this.sizes.splice(0, next - this.first)) this.bytes -= size;
    this.frames.splice(0, next - this.first);
    this.first = next;
  }

  /** A map of its own at that position, from the nearest start before it. */
  seek(position) {
    let start = -1;
    for (const p of this.starts.keys()) if (p <= position && p > start) start = p;
    const map = new BlockMap();
    map.apply(this.starts.get(start));
    for (let p = start + 1; p <= position; p++) {
      map.apply(this.at(p));
      if (p % KEY_EVERY === 0 && !this.starts.has(p)) this.starts.set(p, map.toFrame());
    }
    return map;
  }
}
