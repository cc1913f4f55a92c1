// Time series of the whole history under one cursor. Each chart reads numbers of frames and draws one small canvas.

import { colour } from "./theme.js";
import { el, number } from "./text.js";

/** title, unit, the lines (name, colour, value of a frame), and whether the scale is 0..1. */
const CHARTS = [
  { title: "Blocks in use", share: true, lines: [
    { name: "used", tone: "used", of: (s) => s("used") / s.total },
    { name: "with cached", tone: "cached", of: (s) => (s("used") + s("cached")) / s.total },
  ] },
  { title: "Sequences", lines: [
    { name: "running", tone: "used", of: (s) => s("sequences") },
    { name: "waiting requests", tone: "shared", of: (s) => s("waiting") },
  ] },
  { title: "Tokens per second", lines: [
    { name: "computed", tone: "cached", of: (s) => s.rate("computed_tokens") },
    { name: "drawn", tone: "used", of: (s) => s.rate("generated_tokens") },
  ] },
  { title: "Prefix hit rate", share: true, lines: [
    { name: "of the prompts so far", tone: "used", of: (s) => s("hit_tokens") / (s("queried_tokens") || NaN) },
  ] },
  { title: "Preemptions", lines: [{ name: "since the start", tone: "pending", of: (s) => s("preemptions") }] },
];

export class Charts {
  /** seek(position): the user chose a moment. */
  constructor(root, seek) {
    this.seek = seek;
    this.charts = CHARTS.map((spec) => {
      const canvas = el("canvas", { role: "img" });
      const value = el("strong", {}, "–");
      const keys = spec.lines.map((l) => el("span", { class: "key" }, el("i", { class: `tone-${l.tone}` }), l.name));
      root.append(el("figure", { class: "card chart" }, el("figcaption", {}, el("span", {}, spec.title), value), canvas,
        el("div", { class: "keys" }, ...keys)));
      const point = (event) => {
        if (event.type === "pointermove" && !event.buttons) return;
        const box = canvas.getBoundingClientRect();
        this.seek(Math.round(this.from + ((event.clientX - box.left) / box.width) * (this.to - this.from)));
      };
      canvas.addEventListener("pointerdown", point);
      canvas.addEventListener("pointermove", point);
      return { spec, canvas, value, context: canvas.getContext("2d") };
    });
    this.values = new Map(); // position -> one array of values per chart
  }

  /** Take a frame's numbers in; `before` is the frame before it, `index` maps names to places. */
  add(position, frame, before, index, total) {
    const read = (name) => frame.stats[index[name]];
    read.total = total;
    read.rate = (name) => {
      const seconds = before ? frame.time - before.time : 0;
      return seconds > 0 ? Math.max(0, (frame.stats[index[name]] - before.stats[index[name]]) / seconds) : NaN;
    };
    this.values.set(position, this.charts.map(({ spec }) => spec.lines.map((line) => line.of(read))));
  }

  /** What a line of a chart shows at the cursor. */
  latest(title, line) {
    const index = CHARTS.findIndex((spec) => spec.title === title);
    return this.cursor === undefined ? NaN : this.#mean(index, line, this.cursor, 5);
  }

  /** Draw positions from..to with the cursor at `cursor`. */
  draw(from, to, cursor) {
    for (const position of this.values.keys()) {
      if (position >= from) break;
      this.values.delete(position);
    }
    [this.from, this.to, this.cursor] = [from, Math.max(to, from + 1), cursor];
    this.charts.forEach((chart, i) => this.#chart(chart, i, cursor));
  }

  #chart({ spec, canvas, value, context }, index, cursor) {
    const ratio = Math.min(3, devicePixelRatio || 1), width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    if (canvas.width !== Math.round(width * ratio)) [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const smooth = spec.title === "Tokens per second" ? 5 : 1;
    const lines = spec.lines.map((_, l) => this.#columns(index, l, Math.floor(width), smooth));
    const top = spec.share ? 1 : Math.max(1, ...lines.flat().filter((v) => v === v)) * 1.1;
    const y = (v) => height - 1 - (v / top) * (height - 4);
    context.strokeStyle = colour("line");
    context.lineWidth = 1;
    for (const share of [0.5, 1]) {
      context.beginPath();
      context.moveTo(0, Math.round(y(top * share)) + 0.5);
      context.lineTo(width, Math.round(y(top * share)) + 0.5);
      context.stroke();
    }
    spec.lines.forEach((line, l) => {
      const order = [...spec.lines.keys()].reverse()[l]; // the first line lies on top
      this.#line(context, lines[order], y, height, colour(spec.lines[order].tone), order === 0);
    });
    const x = ((cursor - this.from) / (this.to - this.from)) * width;
    context.strokeStyle = colour("ink");
    context.globalAlpha = 0.6;
    context.beginPath();
    context.moveTo(Math.min(width - 1, Math.max(0.5, x)), 0);
    context.lineTo(Math.min(width - 1, Math.max(0.5, x)), height);
    context.stroke();
    context.globalAlpha = 1;
    const now = this.#mean(index, 0, cursor, smooth);
    value.textContent = now !== now ? "–" : spec.share ? `${(now * 100).toFixed(now < 0.1 && now > 0 ? 1 : 0)} %` : number(Math.round(now));
    canvas.setAttribute("aria-label", `${spec.title}: ${value.textContent}`);
  }

  /** Values per pixel column: what each column covers is averaged, gaps stay gaps. */
  #columns(index, line, width, smooth) {
    const count = Math.max(2, Math.min(width, this.to - this.from + 1)), out = [];
    for (let i = 0; i < count; i++) out.push(this.#mean(index, line, this.from + Math.round((i / (count - 1)) * (this.to - this.from)), smooth));
    return out;
  }

  #mean(index, line, position, over) {
    let sum = 0, n = 0;
    for (let p = position; p > position - over; p--) {
      const v = this.values.get(p)?.[index]?.[line];
      if (v === v && v !== undefined) (sum += v), n++;
    }
    return n ? sum / n : NaN;
  }

  #line(context, values, y, height, stroke, fill) {
    const width = context.canvas.clientWidth, step = width / Math.max(1, values.length - 1);
    context.strokeStyle = context.fillStyle = stroke;
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    let begun = -1;
    const end = (last) => {
      context.stroke();
      if (!fill) return;
      context.lineTo(last * step, height);
      context.lineTo(begun * step, height);
      context.globalAlpha = 0.13;
      context.fill();
      context.globalAlpha = 1;
    };
    values.forEach((v, i) => {
      if (v !== v) {
        if (begun >= 0) end(i - 1);
        begun = -1;
      } else if (begun < 0) {
        begun = i;
        context.beginPath();
        context.moveTo(i * step, y(v));
      } else context.lineTo(i * step, y(v));
    });
    if (begun >= 0) end(values.length - 1);
  }
}
