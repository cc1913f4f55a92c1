// What lies over the map: the logical table of the chosen sequence with arrows to its physical cells, the cursor, and
// forks and copies as they happen. Moves only while something happens, and not at all where motion is not wanted.

import { colour, mix, sequenceColour, stillness, textOn } from "./theme.js";

const LIGHT_UP_MS = 700, EFFECT_MS = 1400, MOST_ARROWS = 600;

export class Overlay {
  constructor({ canvas, stage, scroller, grid, space }) {
    Object.assign(this, { canvas, stage, scroller, grid, space });
    this.context = canvas.getContext("2d");
    this.table = null; // {seq, group, ids}
    this.cursor = -1;
    this.hovered = -1; // logical index under the pointer
    this.effects = []; // {kind, from, to, at}
    this.litAt = 0;
    this.planned = false;
    scroller.addEventListener("scroll", () => this.plan(), { passive: true });
  }

  /** Show a table; `fresh`: light it up in logical order. */
  setTable(table, fresh) {
    this.table = table;
    if (fresh) this.litAt = performance.now();
    this.layout();
  }

  layout() {
    const box = this.stage.getBoundingClientRect();
    const ratio = Math.min(3, devicePixelRatio || 1);
    this.#strip();
    const height = this.stage.clientHeight;
    if (this.width !== box.width || this.height !== height || this.ratio !== ratio) {
      [this.width, this.height, this.ratio] = [box.width, height, ratio];
      this.canvas.width = Math.round(box.width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.width = `${box.width}px`;
      this.canvas.style.height = `${height}px`;
    }
    this.plan();
  }

  /** Size of the cells of the logical table: readable where it is short, several rows where it is long. */
  #strip() {
    if (!this.table) return (this.space.style.height = "0px");
    const width = this.space.clientWidth, n = Math.max(1, this.table.ids.length);
    let cell = 30;
    while (cell > 5 && Math.ceil(n / Math.floor(width / cell)) * Math.min(cell, 22) > 66) cell--;
    this.cell = cell;
    this.cellHeight = Math.min(cell, 22);
    this.perRow = Math.max(1, Math.floor(width / cell));
    const rows = Math.min(Math.ceil(n / this.perRow), Math.floor(110 / this.cellHeight));
    this.space.style.height = `${rows * this.cellHeight + 16}px`;
  }

  /** Logical index at a point of the strip's space, or -1. */
  logicalAt(x, y) {
    if (!this.table || x < 0 || y < 0) return -1;
    const column = Math.floor(x / this.cell);
    if (column >= this.perRow) return -1;
    const logical = Math.floor(y / this.cellHeight) * this.perRow + column;
    return logical < this.table.ids.length ? logical : -1;
  }

  /** Show that something happened: kind "fork" (a sequence's blocks) or "copy" (from one block to another). */
  effect(kind, from, to) {
    this.effects.push({ kind, from, to, at: performance.now() });
    if (this.effects.length > 60) this.effects.splice(0, this.effects.length - 60);
    this.plan();
  }

  setCursor(block) {
    if (this.cursor === block) return;
    this.cursor = block;
    this.plan();
  }

  setHovered(logical) {
    if (this.hovered === logical) return;
    this.hovered = logical;
    this.plan();
  }

  plan() {
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame((now) => {
      this.planned = false;
      this.draw(now);
    });
  }

  draw(now) {
    const { context } = this;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    if (!this.grid.map || !this.grid.size) return;
    const stage = this.stage.getBoundingClientRect(), view = this.scroller.getBoundingClientRect();
    const canvas = this.grid.canvas.getBoundingClientRect();
    this.offset = [canvas.left - stage.left, canvas.top - stage.top];
    this.view = { left: view.left - stage.left, top: view.top - stage.top, right: view.right - stage.left, bottom: view.bottom - stage.top };
    let moving = false;
    if (this.table) moving = this.#drawTable(now, stage);
    moving = this.#drawEffects(now) || moving;
    if (this.cursor >= 0) this.#outline(this.cursor, colour("accent"), 2, 2);
    if (moving) this.plan();
  }

  /** Middle of a block's cell on the overlay, kept inside the part of the map that is seen. */
  #middle(block) {
    const [x, y] = this.grid.cornerOf(block), half = (this.grid.size - this.grid.gap) / 2;
    const top = this.offset[1] + y + half;
    return [this.offset[0] + x + half, Math.max(this.view.top, Math.min(this.view.bottom, top)), top];
  }

  #drawTable(now, stage) {
    const { context, table, cell, cellHeight } = this;
    const space = this.space.getBoundingClientRect(), left = space.left - stage.left, top = space.top - stage.top + 2;
    const n = table.ids.length, tone = sequenceColour(table.seq), line = mix(tone, colour("ink"), 0.3);
    const progress = stillness.matches ? 1 : Math.min(1, (now - this.litAt) / LIGHT_UP_MS);
    const lit = Math.ceil(progress * n);
    const every = Math.max(1, Math.ceil(n / MOST_ARROWS));
    const middle = (i) => [left + (i % this.perRow) * cell + cell / 2 - 1, top + Math.floor(i / this.perRow) * cellHeight];
    const maxRow = Math.floor((space.height - 12) / cellHeight);
    for (let i = 0; i < lit; i += every) {
      if (table.ids[i] < 0 || Math.floor(i / this.perRow) >= maxRow) continue;
      if (i !== this.hovered) this.#arrow(middle(i), cellHeight, table.ids[i], line, n > 80 ? 0.3 : n > 24 ? 0.5 : 0.8, n <= 256);
    }
    if (this.hovered >= 0 && table.ids[this.hovered] >= 0) {
      this.#arrow(middle(this.hovered), cellHeight, table.ids[this.hovered], colour("ink"), 1, true, 2.5);
      this.#outline(table.ids[this.hovered], colour("ink"), 3, 2);
    }
    for (let i = 0; i < lit; i++) {
      if (Math.floor(i / this.perRow) >= maxRow) break;
      const [x, y] = middle(i), width = cell - 2, height = cellHeight - 2, block = table.ids[i];
      const shared = block >= 0 && this.grid.map.ownersOf(block).length > 1;
      const back = block < 0 ? null : shared ? colour("shared") : tone;
      context.globalAlpha = 1;
      if (back) {
        context.fillStyle = back;
        context.fillRect(x - width / 2, y, width, height);
      } else {
        context.strokeStyle = colour("dim");
        context.lineWidth = 1;
        context.setLineDash([2, 2]);
        context.strokeRect(x - width / 2 + 0.5, y + 0.5, width - 1, height - 1);
        context.setLineDash([]);
      }
      if (i === this.hovered) {
        context.strokeStyle = colour("ink");
        context.lineWidth = 2;
        context.strokeRect(x - width / 2, y, width, height);
      }
      if (cell >= 20 && back) {
        context.font = "600 10px ui-monospace, monospace";
        context.textAlign = "center";
        context.textBaseline = "middle";
        context.fillStyle = textOn(back);
        context.fillText(String(block), x, y + height / 2 + 0.5, width - 3);
      }
    }
    return progress < 1;
  }

  /** From a logical cell down to the physical one. */
  #arrow([x, y], cellHeight, block, stroke, alpha, head, width = 1.4) {
    const { context } = this, [tx, middle, real] = this.#middle(block), sy = y + cellHeight - 1;
    const hidden = real !== middle, ty = hidden ? middle : middle - this.grid.size / 2 + 3;
    const bend = Math.max(14, (ty - sy) * 0.45);
    context.globalAlpha = alpha;
    context.strokeStyle = context.fillStyle = stroke;
    context.lineWidth = width;
    context.beginPath();
    context.moveTo(x, sy);
    context.bezierCurveTo(x, sy + bend, tx, ty - bend, tx, ty - 3);
    context.stroke();
    if (head) { // points down at the cell; hollow where the cell itself is scrolled away
      const reach = Math.max(4, Math.min(6, this.grid.size / 2));
      context.beginPath();
      context.moveTo(tx, ty + 1);
      context.lineTo(tx - reach * 0.7, ty - reach);
      context.lineTo(tx + reach * 0.7, ty - reach);
      context.closePath();
      if (hidden) context.stroke();
      else context.fill();
    }
    context.globalAlpha = 1;
  }

  #outline(block, stroke, width, out) {
    const [x, y] = this.grid.cornerOf(block), side = this.grid.size - this.grid.gap, { context } = this;
    const top = this.offset[1] + y;
    if (top + side < this.view.top || top > this.view.bottom) return;
    context.strokeStyle = stroke;
    context.lineWidth = width;
    context.strokeRect(this.offset[0] + x - out, top - out, side + 2 * out, side + 2 * out);
  }

  #drawEffects(now) {
    this.effects = this.effects.filter((e) => now - e.at < EFFECT_MS);
    const still = stillness.matches;
    for (const effect of this.effects) {
      const share = Math.max(0, (now - effect.at) / EFFECT_MS);
      this.context.globalAlpha = still ? 0.9 : 0.9 * (1 - share);
      const grow = still ? 0 : -2 + 3 * share;
      if (effect.kind === "copy") {
        this.#outline(effect.from, colour("shared"), 2, 0);
        this.#outline(effect.to, colour("accent"), 2, still ? 1 : 3 - 3 * share);
        this.#hop(effect.from, effect.to, still ? 1 : Math.min(1, share * 2.5));
      } else for (const block of effect.from) this.#outline(block, colour("ink"), 1.5, grow);
    }
    this.context.globalAlpha = 1;
    return this.effects.length > 0;
  }

  /** The way a copy went, from the shared block to the new one. */
  #hop(from, to, share) {
    const { context } = this, [x1, y1] = this.#middle(from), [x2, y2] = this.#middle(to);
    const lift = Math.min(60, 16 + Math.hypot(x2 - x1, y2 - y1) / 5);
    const at = (t) => [
      (1 - t) ** 2 * x1 + 2 * t * (1 - t) * ((x1 + x2) / 2) + t * t * x2,
      (1 - t) ** 2 * y1 + 2 * t * (1 - t) * ((y1 + y2) / 2 - lift) + t * t * y2,
    ];
    context.strokeStyle = context.fillStyle = colour("accent");
    context.lineWidth = 1.3;
    context.beginPath();
    const tail = this.effects.length > 3 ? Math.max(0, share - 0.35) : 0; // many at once: comets instead of lines
    context.moveTo(...at(tail));
    for (let t = tail + 0.07; t < share; t += 0.07) context.lineTo(...at(t));
    const end = at(share);
    context.lineTo(...end);
    context.stroke();
    context.beginPath();
    context.arc(end[0], end[1], 2.5, 0, 7);
    context.fill();
  }
}
