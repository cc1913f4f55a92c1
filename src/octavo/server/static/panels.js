// The lists beside the map: counters, legend, sequences, the queue, events, and where the bytes are.

import { STATE_NAMES, FREE, PENDING } from "./map.js";
import { sequenceColour, ageColour } from "./theme.js";
import { bytes, el, number, percent, plural } from "./text.js";

const MOST_ROWS = 200, MOST_EVENTS = 120;

/** Numbers at the top. */
export class Counters {
  constructor(root) {
    this.cells = {};
    for (const [name, label] of [["blocks", "blocks in use"], ["sequences", "sequences"], ["waiting", "waiting"],
      ["hits", "prefix hits"], ["sharing", "saved by sharing"], ["copies", "forks · copies"], ["preemptions", "preemptions"], ["step", "step"]]) {
      const value = el("b", { id: `count-${name}` }, "–"), note = el("small");
      root.append(el("div", { class: "counter" }, el("span", {}, label), value, note));
      this.cells[name] = [value, note];
    }
    const meter = el("div", { class: "meter", "aria-hidden": "true" });
    this.meter = ["shared", "used", "pending", "cached"].map((tone) => meter.appendChild(el("i", { class: `tone-${tone}` })));
    root.append(meter);
  }

  show(map, waste, rate) {
    const s = (name) => map.stat(name), total = map.numBlocks;
    const set = (name, value, note = "") => {
      const [b, small] = this.cells[name];
      if (b.textContent !== value) b.textContent = value;
      if (small.textContent !== note) small.textContent = note;
    };
    set("blocks", number(s("used")), `of ${number(total)} · ${percent(s("used") / total)}`);
    set("sequences", number(s("sequences")), plural(s("running"), "request"));
    set("waiting", number(s("waiting")), s("swapped_blocks") ? `${number(s("swapped_blocks"))} blocks swapped` : "");
    set("hits", s("queried_tokens") ? percent(s("hit_tokens") / s("queried_tokens")) : "–", `${number(s("hit_tokens"))} tokens`);
    set("sharing", bytes(waste.sharedSaved), plural(s("shared"), "shared block"));
    set("copies", `${number(s("forks"))} · ${number(s("copies"))}`, "on write");
    set("preemptions", number(s("preemptions")), s("evictions") ? `${number(s("evictions"))} evicted` : "");
    set("step", number(map.step), rate === rate ? `${number(Math.round(rate))} tokens/s` : "");
    const shares = [s("shared"), s("used") - s("shared"), s("pending"), s("cached")];
    this.meter.forEach((bar, i) => (bar.style.width = `${(100 * shares[i]) / total}%`));
  }
}

/** What the colours mean, with counts. */
export function showLegend(root, map, mode) {
  const entries = [];
  const entry = (tone, label, count) => entries.push(el("span", { class: "key" }, el("i", { class: `tone-${tone}` }), label,
    count === undefined ? null : el("b", {}, number(count))));
  if (mode === "age") {
    for (const age of [0, 15, 255, 4095]) {
      const swatch = el("i");
      swatch.style.background = ageColour(age);
      entries.push(el("span", { class: "key" }, swatch, age ? `${number(age)} steps ago` : "used in this step"));
    }
  } else if (mode === "sequence") {
    for (const seq of [...map.sequences.values()].slice(0, 8)) {
      const swatch = el("i");
      swatch.style.background = sequenceColour(seq.id);
      entries.push(el("span", { class: "key" }, swatch, `seq ${seq.id}`));
    }
    if (map.sequences.size > 8) entries.push(el("span", { class: "key" }, `and ${map.sequences.size - 8} more`));
    entry("cached", "cached", map.stat("cached"));
    entry("free", "free", map.stat("free"));
  } else {
    entry("used", "used", map.stat("used") - map.stat("shared"));
    entry("shared", "shared", map.stat("shared"));
    entry("cached", "cached", map.stat("cached"));
    entry("free", "free", map.stat("free"));
    if (map.stat("pending")) entry("pending", "pending", map.stat("pending"));
  }
  root.replaceChildren(...entries);
}

/** The list of sequences: search, arrow keys, click. */
export class SequenceList {
  constructor({ list, search, count, queue, choose }) {
    Object.assign(this, { list, search, count, queue, choose });
    this.selected = null;
    this.rows = new Map();
    search.addEventListener("input", () => this.map && this.show(this.map));
    search.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "Enter") {
        event.preventDefault();
        list.focus();
        this.#step(0);
      }
    });
    list.addEventListener("keydown", (event) => {
      const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      this.#step(move);
    });
    list.addEventListener("click", (event) => {
      const row = event.target.closest("[role=option]");
      if (row) choose(Number(row.dataset.seq) === this.selected ? null : Number(row.dataset.seq));
    });
  }

  #step(move) {
    const ids = [...this.list.children].map((row) => Number(row.dataset.seq));
    if (!ids.length) return;
    const at = ids.indexOf(this.selected);
    const next = at < 0 ? (move < -1 ? 0 : move > 1 ? ids.length - 1 : 0) : Math.max(0, Math.min(ids.length - 1, at + move));
    this.choose(ids[next]);
    this.rows.get(ids[next])?.row.scrollIntoView({ block: "nearest" });
  }

  show(map) {
    this.map = map;
    const words = this.search.value.trim().toLowerCase();
    const matching = [...map.sequences.values()].filter((seq) =>
      !words || `seq ${seq.id} ${seq.request}`.toLowerCase().includes(words));
    const shown = matching.slice(0, MOST_ROWS), ids = new Set(shown.map((s) => s.id));
    for (const [id, { row }] of this.rows) if (!ids.has(id)) (row.remove(), this.rows.delete(id));
    shown.forEach((seq, place) => this.#row(seq, map, place));
    this.count.textContent = words ? `${matching.length} of ${map.sequences.size}` : `${map.sequences.size} running`;
    if (matching.length > shown.length) this.count.textContent += ` · first ${MOST_ROWS}`;
    const waiting = map.waiting.slice(0, 6).map((w) => w[0] + (w[3] ? " (preempted)" : ""));
    const more = map.stat("waiting") - waiting.length;
    this.queue.textContent = waiting.length ? `Waiting: ${waiting.join(", ")}${more > 0 ? ` and ${number(more)} more` : ""}` : "";
    const chosen = this.rows.get(this.selected)?.row;
    if (chosen) this.list.setAttribute("aria-activedescendant", chosen.id);
    else this.list.removeAttribute("aria-activedescendant");
  }

  #row(seq, map, place) {
    let entry = this.rows.get(seq.id);
    if (!entry) {
      const swatch = el("i"), name = el("span", { class: "name" }, `seq ${seq.id}`), request = el("span", { class: "request" });
      request.textContent = seq.index ? `${seq.request} · sample ${seq.index}` : seq.request;
      const facts = el("span", { class: "facts" });
      const row = el("li", { role: "option", id: `seq-${seq.id}`, "data-seq": seq.id }, swatch, name, request, facts);
      swatch.style.background = sequenceColour(seq.id);
      entry = { row, facts };
      this.rows.set(seq.id, entry);
    }
    if (this.list.children[place] !== entry.row) this.list.insertBefore(entry.row, this.list.children[place] ?? null);
    const blocks = seq.tables.reduce((n, t) => n + t.filter((b) => b >= 0).length, 0);
    const text = `${number(seq.tokens)} tok · ${number(blocks)} blk`;
    if (entry.facts.textContent !== text) entry.facts.textContent = text;
    entry.row.setAttribute("aria-selected", String(seq.id === this.selected));
  }
}

/** What happened, newest first; a click shows where. */
export class EventLog {
  constructor(root, show) {
    this.root = root;
    this.entries = [];
    this.forks = new Map(); // sequence -> the latest that forked off it
    this.shownTo = null;
    root.addEventListener("click", (event) => {
      const row = event.target.closest("li");
      if (row?.entry) show(row.entry);
    });
  }

  /** Work out what a frame brought. `before`: the map before the frame is applied, null for the first. */
  add(position, frame, before) {
    const put = (kind, text, more = {}) => this.entries.push({ position, step: frame.step, kind, text, ...more });
    const preempted = new Map((frame.waiting ?? []).filter((w) => w[3]).map((w) => [w[0], w]));
    if (before) for (const id of frame.gone) {
      const seq = before.sequences.get(id);
      if (!seq) continue;
      if (preempted.has(seq.request)) put("preempt", `seq ${id} preempted: its blocks went back, ${seq.request} waits`);
      else put("end", `seq ${id} ended with ${plural(seq.tokens, "token")}`);
    }
    if (before) for (const [id, request, index] of frame.new) put("start", `seq ${id} has blocks (${request}${index ? `, sample ${index}` : ""})`, { seq: id });
    for (const [, step, kind, sequence, source, target] of frame.events) {
      if (kind === "fork") this.forks.set(source, target);
      if (kind === "fork") this.entries.push({ position, step, kind, text: `seq ${target} forked from seq ${source}`, seq: target });
      else if (kind === "copy") this.#copy(position, step, sequence, source, target);
      else this.entries.push({ position, step, kind: "swap", text: `seq ${sequence}: ${plural(source, "block")} ${kind === "swap in" ? "back from" : "out to"} host memory` });
    }
    if (frame.missed) put("missed", `${number(frame.missed)} forks and copies between two frames are not listed`);
    if (this.entries.length > 20000) this.entries.splice(0, 5000);
  }

  /** A copy-on-write; those of one sequence in one step (one for each group of layers) are one entry. */
  #copy(position, step, seq, from, to) {
    const last = this.entries.at(-1);
    if (last?.kind === "copy" && last.seq === seq && last.step === step && last.position === position) {
      last.copies.push([from, to]);
      last.text = `copy-on-write: ${last.from} → ${last.to} and ${last.copies.length - 1} more for seq ${seq}`;
    } else {
      const text = `copy-on-write: ${from} → ${to} for seq ${seq}`;
      this.entries.push({ position, step, kind: "copy", text, from, to, seq, copies: [[from, to]] });
    }
  }

  /** Show what happened up to a position. */
  show(position) {
    let end = this.entries.length;
    while (end && this.entries[end - 1].position > position) end--;
    const newest = this.entries[end - 1];
    if (this.shownTo === newest && newest) return;
    this.shownTo = newest;
    this.root.replaceChildren(...this.entries.slice(Math.max(0, end - MOST_EVENTS), end).reverse().map((entry) => {
      const row = el("li", { class: `event ${entry.kind}` }, el("span", { class: "step" }, number(entry.step)), el("span", {}, entry.text));
      row.entry = entry;
      return row;
    }));
  }
}

/** Bytes of the pool by what they are good for, and the same load with static allocation. */
export function showWaste({ bar, list, fixed }, map, w) {
  const parts = [["filled", "used", w.filled, "keys and values"], ["fragmented", "used-rest", w.fragmented, "unfilled ends of blocks"],
    ["cached", "cached", w.cached, "cached, nobody holds it"], ["pending", "pending", w.pending, "waits for a step in flight"], ["free", "free", w.free, "free"]];
  if (!bar.children.length) for (const [, tone] of parts) bar.append(el("i", { class: `tone-${tone}` }));
  parts.forEach(([, , count], i) => (bar.children[i].style.width = `${(100 * count) / w.total}%`));
  bar.setAttribute("aria-label", parts.map(([, , count, label]) => `${label}: ${bytes(count)}`).join(", "));
  list.replaceChildren(...parts.filter(([, , count], i) => count || i < 3).flatMap(([, tone, count, label]) => [
    el("dt", {}, el("i", { class: `tone-${tone}` }), label), el("dd", {}, `${bytes(count)} · ${percent(count / w.total)}`)]));
  if (!map.sequences.size) fixed.textContent = `Static allocation would hold ${plural(w.staticSequences, "sequence")} in this pool, whatever their length.`;
  else {
    const saved = 1 - w.used / w.static;
    fixed.textContent = `Static allocation would reserve ${bytes(w.static)} for the ${plural(map.sequences.size, "sequence")} running now; `
      + `the block tables hold ${bytes(w.used)} (${percent(Math.abs(saved))} ${saved >= 0 ? "less" : "more"}). `
      + `It would hold ${plural(w.staticSequences, "sequence")} in this pool.`;
  }
}

/** The counterfactual over the whole run and the reasons of prefix misses, from `/blocks/report`. */
export function showRun(root, report) {
  const c = report?.counterfactual;
  root.hidden = !c || !c.peak_sequences;
  if (root.hidden) return;
  root.textContent = `So far: ${plural(c.peak_sequences, "sequence")} at once in at most ${bytes(c.paged_peak_bytes)}; `
    + `static allocation would have needed ${bytes(c.static_peak_bytes)} for them.${missText(report.miss_reasons)}`;
}

/** Why look-ups in the prefix cache ended where they did, most frequent first. */
function missText(reasons) {
  const rows = Object.entries(reasons ?? {}).sort((a, b) => b[1] - a[1]);
  if (!rows.length) return "";
  return ` Prefix look-ups ended: ${rows.map(([reason, count]) => `${number(count)} ${reason === "none" ? "all found" : reason}`).join(", ")}.`;
}

/** All about one block, as lines for the tooltip. `tokens`: its text, undefined where it is not known or not shown. */
export function describeBlock(map, block, tokens) {
  const state = map.states[block], owners = map.ownersOf(block), key = map.keyOf(block), age = map.age(block);
  const lines = [["state", `${STATE_NAMES[state]}${owners.length > 1 ? `, held by ${owners.length} tables` : ""}`]];
  const grouped = map.windows.length > 1;
  if (owners.length) {
    const text = owners.slice(0, 6).map((o) => `seq ${o.seq}[${o.logical}]`).join(", ");
    lines.push(["held by", text + (owners.length > 6 ? ` and ${owners.length - 6} more` : "")]);
    if (grouped) lines.push(["layers", groupName(map, owners[0].group)]);
  } else if (key && grouped) lines.push(["layers", groupName(map, key.group)]);
  if (state !== FREE && state !== PENDING) lines.push(["filled", `${map.fills[block]} of ${map.blockSize} slots`]);
  if (age !== null) lines.push([owners.length ? "last read" : "last held", age === 0 ? "in this step" : `${plural(age, "step")} ago`]);
  if (key) {
    lines.push(["content", `#${key.hash}`]);
    const parent = key.parentBlock === undefined ? "" : ` = block ${key.parentBlock}`;
    lines.push(["after", isRoot(map, block, key) ? "the beginning of a prompt" : `#${key.parent}${parent}`]);
  }
  return { title: `Block ${number(block)}`, lines, tokens: state === FREE ? undefined : tokens };
}

function isRoot(map, block, key) {
  return key.parentBlock === undefined && map.ownersOf(block).some((o) => o.logical === 0);
}

/** "full", "w512", or "w512 2" where several groups have the same window. */
export function shortGroup(windows, group) {
  const name = windows[group] === null ? "full" : `w${windows[group]}`;
  const alike = windows.filter((w) => w === windows[group]).length;
  return alike > 1 ? `${name} ${windows.slice(0, group + 1).filter((w) => w === windows[group]).length}` : name;
}

export const groupName = (map, group) => {
  const window = map.windows[group];
  return `group ${group}, ${window === null ? "sees everything" : `window ${number(window)}`}`;
};
