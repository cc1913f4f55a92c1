// The map: one cell per physical block on a canvas. Draws a cell only when its block has changed, in animation frames.

import { FREE, CACHED, SHARED, PENDING } from "./map.js";
import { colour, sequenceColour, ageColour, textOn } from "./theme.js";

const LARGEST = 40, SMALLEST = 4;

export class Grid {
  constructor(canvas, scroller) {
    this.canvas = canvas;
    this.scroller = scroller;
    this.context = canvas.getContext("2d", { alpha: false });
    this.map = null;
    this.mode = "state";
    this.selected = new Map(); // block -> logical index, of the table that is lit
    this.zoom = 0;
    this.drawn = 0; // cells drawn since the page was opened: a measure, read by tests
    this.dirty = new Set();
    this.all = true;
    this.planned = false;
  }

  setMap(map) {
    const resized = this.map?.numBlocks !== map.numBlocks;
    this.map = map;
    if (resized) this.layout();
    this.markAll();
  }

  setMode(mode) {
    this.mode = mode;
    this.markAll();
  }

  setSelected(blocks) {
    const was = this.selected;
    this.selected = blocks;
    if (!was.size !== !blocks.size) this.markAll(); // everything else fades or comes back
    else this.mark([...was.keys(), ...blocks.keys()]);
  }

  /** Choose the size of the cells: as large as lets the whole pool be seen, then larger or smaller by `zoom`. */
  layout() {
    if (!this.map) return;
    const width = Math.max(40, this.scroller.clientWidth - 2), n = this.map.numBlocks;
    const height = Math.max(280, Math.min(innerHeight - 460, 640));
    let size = Math.floor(Math.sqrt((width * height) / n));
    while (size > SMALLEST && Math.ceil(n / Math.floor(width / size)) * size > height) size--;
    size = Math.max(SMALLEST, Math.min(LARGEST, size));
    size = Math.max(3, Math.min(48, size + this.zoom * Math.max(1, Math.round(size / 5))));
    this.ratio = Math.min(3, devicePixelRatio || 1);
    this.size = size;
    this.gap = size >= 12 ? 2 : size >= 5 ? 1 : 0.5;
    this.columns = Math.max(1, Math.floor(width / size));
    this.rows = Math.ceil(n / this.columns);
    const [w, h] = [this.columns * size, this.rows * size];
    this.canvas.width = Math.round(w * this.ratio);
    this.canvas.height = Math.round(h * this.ratio);
    this.canvas.style.width = `${w}px`;
    this.canvas.style.height = `${h}px`;
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.markAll();
  }

  mark(blocks) {
    if (this.mode === "age") return this.markAll(); // every age has grown
    for (const block of blocks) this.dirty.add(block);
    this.#plan();
  }

  markAll() {
    this.all = true;
    this.#plan();
  }

  #plan() {
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => {
      this.planned = false;
      this.draw();
    });
  }

  draw() {
    if (!this.map || !this.size) return;
    if (this.all) {
      this.context.fillStyle = colour("paper");
      this.context.fillRect(0, 0, this.columns * this.size, this.rows * this.size);
      for (let block = 0; block < this.map.numBlocks; block++) this.#cell(block);
    } else for (const block of this.dirty) this.#cell(block);
    this.all = false;
    this.dirty.clear();
  }

  #cell(block) {
    this.drawn++;
    const { context, size, gap } = this;
    const x = (block % this.columns) * size, y = Math.floor(block / this.columns) * size, side = size - gap;
    context.fillStyle = colour("paper");
    context.fillRect(x, y, size, size);
    const lit = this.selected.get(block);
    context.globalAlpha = this.selected.size && lit === undefined ? 0.22 : 1;
    const shown = this.#paint(block, x, y, side);
    context.globalAlpha = 1;
    if (lit !== undefined) this.#light(x, y, side, lit, shown);
  }

  /** Fill one cell by the mode; returns the colour that most of it has. */
  #paint(block, x, y, side) {
    const { map, context } = this, state = map.states[block];
    if (state === FREE) return this.#solid("free", x, y, side);
    if (state === PENDING) return this.#striped(x, y, side);
    if (this.mode === "age") {
      const age = map.age(block);
      context.fillStyle = age === null ? colour("free") : ageColour(age);
      context.fillRect(x, y, side, side);
      return context.fillStyle;
    }
    if (state === CACHED) {
      this.#solid("cached", x, y, side);
      if (side >= 9) { // kept, not held: hollow
        context.fillStyle = colour("paper");
        const inset = Math.max(2, Math.round(side * 0.28));
        context.globalAlpha *= 0.75;
        context.fillRect(x + inset, y + inset, side - 2 * inset, side - 2 * inset);
      }
      return colour("cached");
    }
    const owners = map.ownersOf(block);
    const fill = map.fills[block] / map.blockSize, level = side >= 6 ? Math.round(side * (1 - fill)) : fill >= 0.5 ? 0 : side;
    if (this.mode === "sequence") {
      const seqs = [...new Set(owners.map((o) => o.seq))].slice(0, side >= 9 ? 4 : 2);
      seqs.forEach((seq, i) => {
        context.fillStyle = sequenceColour(seq);
        const from = Math.round((side * i) / seqs.length), to = Math.round((side * (i + 1)) / seqs.length);
        context.fillRect(x + from, y, to - from, side);
      });
      if (level) {
        context.globalAlpha *= 0.62;
        context.fillStyle = colour("paper");
        context.fillRect(x, y, side, level);
      }
      return seqs.length ? sequenceColour(seqs[0]) : colour("used");
    }
    const name = state === SHARED ? "shared" : "used";
    context.fillStyle = colour(name);
    context.fillRect(x, y, side, side);
    if (level) {
      context.fillStyle = colour(`${name}-rest`);
      context.fillRect(x, y, side, level);
    }
    if (state === SHARED && side >= 8) this.#count(owners.length, x, y, side);
    return colour(name);
  }

  #solid(name, x, y, side) {
    this.context.fillStyle = colour(name);
    this.context.fillRect(x, y, side, side);
    return colour(name);
  }

  #striped(x, y, side) {
    this.#solid("free", x, y, side);
    this.context.fillStyle = colour("pending");
    for (let i = 0; i < side; i += 4) this.context.fillRect(x + i, y, Math.min(2, side - i), side);
    return colour("pending");
  }

  /** How many tables hold a shared block: a number where it fits, else a corner. */
  #count(count, x, y, side) {
    const { context } = this;
    context.fillStyle = textOn(colour("shared"));
    if (side >= 15) {
      context.font = `600 ${Math.min(12, Math.round(side * 0.55))}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      if (!this.selected.size) context.fillText(count > 99 ? "99" : String(count), x + side / 2, y + side / 2 + 0.5);
    } else {
      const corner = Math.max(3, Math.round(side / 3));
      context.beginPath();
      context.moveTo(x + side - corner, y);
      context.lineTo(x + side, y);
      context.lineTo(x + side, y + corner);
      context.fill();
    }
  }

  #light(x, y, side, logical, shown) {
    const { context } = this;
    context.lineWidth = side >= 8 ? 2 : 1;
    context.strokeStyle = colour("ink");
    const half = context.lineWidth / 2;
    context.strokeRect(x + half, y + half, side - 2 * half, side - 2 * half);
    if (side < 15) return;
    context.font = `600 ${Math.min(12, Math.round(side * 0.5))}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillStyle = /^#[0-9a-f]{6}$/i.test(shown) ? textOn(shown) : colour("ink");
    context.fillText(String(logical), x + side / 2, y + side / 2 + 0.5, side - 3);
  }

  /** Block under a point of the canvas, or -1. */
  blockAt(x, y) {
    const column = Math.floor(x / this.size), row = Math.floor(y / this.size);
    if (column < 0 || column >= this.columns || row < 0) return -1;
    const block = row * this.columns + column;
    return this.map && block < this.map.numBlocks ? block : -1;
  }

  /** Top left corner of a block's cell on the canvas. */
  cornerOf(block) {
    return [(block % this.columns) * this.size, Math.floor(block / this.columns) * this.size];
  }
}
