// The page: joins the stream (or a run that the page carries in itself), the history, the map and the panels.

import { Charts } from "./charts.js";
import { Grid } from "./grid.js";
import { Overlay } from "./overlay.js";
import { Counters, EventLog, SequenceList, describeBlock, groupName, shortGroup, showLegend, showRun, showWaste } from "./panels.js";
import { Player } from "./player.js";
import { Stream, getJSON, key } from "./stream.js";
import { el, number, visible } from "./text.js";
import { readTheme, themeButton } from "./theme.js";

const $ = (id) => document.getElementById(id);
const MODES = ["state", "sequence", "age"];

class Page {
  constructor() {
    this.selected = null; // {seq, group}
    this.cursor = -1;
    this.texts = new Map(); // block -> {at, tokens}: text asked for, good for the moment `at`
    this.player = new Player({ show: (changed, frame) => this.show(changed, frame), length: () => this.scrubber() });
    this.grid = new Grid($("grid"), $("scroller"));
    this.overlay = new Overlay({ canvas: $("overlay"), stage: $("stage"), scroller: $("scroller"), grid: this.grid, space: $("strip-space") });
    this.counters = new Counters($("counters"));
    this.charts = new Charts($("charts"), (position) => this.player.seek(position));
    this.list = new SequenceList({ list: $("sequences"), search: $("search"), count: $("seq-count"), queue: $("queue"), choose: (seq) => this.select(seq) });
    this.log = new EventLog($("log"), (entry) => this.showEvent(entry));
    themeButton($("theme"), () => this.recolour());
    this.#controls();
    this.#pointer();
    this.#keys();
    new ResizeObserver(() => this.#resize()).observe($("stage"));
  }

  // -- frames ------------------------------------------------------------------------------------------------------

  /** A frame from the line or from the file. */
  take(frame, size) {
    const { history } = this.player;
    const before = history.length && !("pool" in frame) ? history.head : null;
    this.log.add(history.last + 1, frame, before);
    const previous = history.length ? history.at(history.last) : null;
    this.player.push(frame, size);
    this.charts.add(history.last, frame, "pool" in frame && history.length > 1 ? null : previous, history.head.statIndex, history.head.numBlocks);
  }

  /** The moment shown has changed: draw what is different. */
  show(changed, frame) {
    const { map } = this.player;
    if (changed === null || this.grid.map !== map) {
      const size = this.shownBlocks;
      this.grid.setMap(map);
      if (size !== map.numBlocks) this.grid.layout();
      this.shownBlocks = map.numBlocks;
      this.texts.clear();
    } else this.grid.mark(changed);
    if (frame && changed !== null) this.#effects(frame);
    if (this.cursor >= map.numBlocks) this.cursor = -1;
    $("empty").hidden = true;
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => {
      this.planned = false;
      this.#table(false);
      this.scrubber();
      this.panels();
      this.refreshTip();
    });
  }

  panels() {
    const { map, position } = this.player, waste = map.waste();
    this.counters.show(map, waste, this.charts.latest("Tokens per second", 1));
    showLegend($("legend"), map, this.grid.mode);
    this.list.show(map);
    this.log.show(position);
    showWaste({ bar: $("waste-bar"), list: $("waste-list"), fixed: $("waste-static") }, map, waste);
  }

  scrubber() {
    const { player } = this, { history } = player, slider = $("time");
    if (!history.length) return;
    slider.min = history.first;
    slider.max = history.last;
    slider.value = player.position;
    const frame = history.at(player.position), newest = history.at(history.last);
    const behind = newest.time - frame.time;
    const text = `step ${number(frame.step)}` + (this.run ? ` · ${frame.time.toFixed(2)} s` : behind > 0.05 ? ` · −${behind.toFixed(1)} s` : "");
    $("moment").textContent = text;
    slider.setAttribute("aria-valuetext", text);
    const moving = player.following || player.playing;
    $("play").dataset.moving = moving;
    $("play").setAttribute("aria-label", moving ? "Pause" : "Go on");
    $("live").setAttribute("aria-pressed", String(player.following));
    this.status();
    this.charts.draw(history.first, history.last, player.position);
  }

  #effects(frame) {
    const mine = this.player.map.sequences, chosen = this.selected?.seq;
    const events = chosen === undefined ? frame.events : frame.events.filter(([, , , seq, source]) => seq === chosen || source === chosen);
    for (const [, , kind, , source, target] of events.slice(-8)) {
      if (kind === "copy") this.overlay.effect("copy", source, target);
      else if (kind === "fork" && mine.has(target)) this.overlay.effect("fork", mine.get(target).tables.flat().filter((b) => b >= 0).slice(-64));
    }
  }

  // -- choosing ----------------------------------------------------------------------------------------------------

  select(seq, group = this.selected?.group ?? 0) {
    this.selected = seq === null ? null : { seq, group };
    this.list.selected = seq;
    this.#table(true);
    if (this.player.map) this.list.show(this.player.map);
    if (seq !== null) this.say(this.describeSequence(seq));
  }

  describeSequence(id) {
    const seq = this.player.map?.sequences.get(id);
    if (!seq) return `seq ${id} holds no blocks at this moment`;
    const table = seq.tables[this.selected.group];
    return `seq ${id}: [${table.slice(0, 64).map((b) => (b < 0 ? "·" : b + (this.player.map.ownersOf(b).length > 1 ? "*" : ""))).join(", ")}${table.length > 64 ? ", …" : ""}]`;
  }

  /** The chosen sequence's table, on the strip and lit up in the map. */
  #table(fresh) {
    const { map } = this.player;
    if (this.selected && map && !map.sequences.has(this.selected.seq)) this.#heir(map);
    const chosen = this.selected && map?.sequences.get(this.selected.seq);
    const strip = $("strip"), hidden = !this.selected;
    const resized = strip.hidden !== hidden;
    strip.hidden = hidden;
    if (chosen && this.selected.group >= chosen.tables.length) this.selected.group = 0;
    const ids = chosen ? chosen.tables[this.selected.group] : [];
    this.grid.setSelected(new Map(ids.flatMap((block, logical) => (block < 0 ? [] : [[block, logical]]))));
    this.overlay.setTable(chosen ? { seq: this.selected.seq, group: this.selected.group, ids } : null, fresh || resized);
    $("reader").textContent = this.selected && map ? this.describeSequence(this.selected.seq) : "";
    if (!this.selected) return;
    $("strip-title").textContent = chosen
      ? `seq ${chosen.id} · ${chosen.request}${chosen.index ? ` · sample ${chosen.index}` : ""} · ${number(chosen.tokens)} tokens in ${number(ids.filter((b) => b >= 0).length)} blocks, in logical order`
      : `seq ${this.selected.seq} holds no blocks at this moment`;
    this.#groups();
  }

  /** A beam that ends lives on in the ones that forked off it: follow those. */
  #heir(map) {
    let seq = this.selected.seq;
    for (let i = 0; i < 64 && seq !== undefined && !map.sequences.has(seq); i++) seq = this.log.forks.get(seq);
    if (seq === undefined || !map.sequences.has(seq)) return;
    this.selected.seq = this.list.selected = seq;
  }

  #groups() {
    const { map } = this.player, box = $("groups");
    box.hidden = map.windows.length < 2;
    if (box.children.length !== map.windows.length) box.replaceChildren(...map.windows.map((window, group) => {
      const button = el("button", { type: "button", role: "radio", title: groupName(map, group) }, shortGroup(map.windows, group));
      button.addEventListener("click", () => this.select(this.selected.seq, group));
      return button;
    }));
    [...box.children].forEach((b, group) => {
      b.setAttribute("aria-checked", String(group === this.selected.group));
      b.tabIndex = group === this.selected.group ? 0 : -1;
    });
  }

  showEvent(entry) {
    if (entry.position !== this.player.position && entry.position >= this.player.history.first) this.player.seek(entry.position);
    if (entry.seq !== undefined) this.select(entry.seq);
    if (entry.kind === "copy") {
      for (const [from, to] of entry.copies) this.overlay.effect("copy", from, to);
      this.moveCursor(entry.to);
    }
  }

  /** The sequence that holds the block under the cursor; again: the next of its owners. */
  followBlock(block) {
    const { map } = this.player, owners = [...new Map(map.ownersOf(block).map((o) => [o.seq, o])).values()];
    if (!owners.length) return this.select(null);
    const at = owners.findIndex((o) => o.seq === this.selected?.seq);
    const next = owners[(at + 1) % owners.length];
    if (at >= 0 && owners.length === 1) this.select(null);
    else this.select(next.seq, next.group);
  }

  /** For those who listen; what is read below the map follows the table by itself. */
  say(text) {
    $("spoken").textContent = text;
  }

  // -- the tip -------------------------------------------------------------------------------------------------------

  moveCursor(block, { tip = true, x, y } = {}) {
    this.cursor = block;
    this.overlay.setCursor(block);
    if (block < 0 || !tip) return this.hideTip();
    const box = this.grid.canvas.getBoundingClientRect(), [cx, cy] = this.grid.cornerOf(block);
    this.tipAt = x === undefined ? [box.left + cx + this.grid.size, box.top + cy + this.grid.size] : [x, y];
    this.refreshTip();
    this.#ask(block);
  }

  hideTip() {
    this.tipAt = null;
    $("tip").hidden = true;
  }

  refreshTip() {
    if (!this.tipAt || this.cursor < 0 || !this.player.map) return;
    const about = describeBlock(this.player.map, this.cursor, this.textOf(this.cursor)), tip = $("tip");
    const rows = about.lines.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
    tip.replaceChildren(el("strong", {}, about.title), el("dl", {}, ...rows));
    if (about.tokens?.length) tip.append(el("p", { class: "tokens" }, ...about.tokens.map((t) => el("span", {}, visible(t)))));
    tip.hidden = false;
    const [x, y] = this.tipAt, w = tip.offsetWidth, h = tip.offsetHeight;
    tip.style.left = `${Math.max(6, x + 14 + w > innerWidth ? Math.min(x - w - 10, innerWidth - w - 6) : x + 14)}px`;
    tip.style.top = `${Math.max(6, y + 14 + h > innerHeight ? y - h - 10 : y + 14)}px`;
    this.spoken = `${about.title}: ${about.lines.map(([n, v]) => `${n} ${v}`).join("; ")}`;
  }

  /** Text of a block's tokens: from the run in the page, or what the server has told for this moment. */
  textOf(block) {
    const { map, position } = this.player;
    if (this.run) {
      const owner = map.ownersOf(block)[0], from = owner && owner.logical * map.blockSize;
      if (owner) return this.run.tokens?.[owner.seq]?.slice(from, from + map.fills[block]);
      const known = map.keys.get(block);
      return known && this.run.texts?.get(known.hash);
    }
    const told = this.texts.get(block);
    return told && told.at === position ? told.tokens : told?.tokens && this.player.following ? told.tokens : undefined;
  }

  #ask(block) {
    if (this.run || !this.hello?.show_tokens || !this.player.following) return;
    clearTimeout(this.asking);
    this.asking = setTimeout(async () => {
      try {
        const answer = await getJSON(`/blocks/block/${block}`);
        this.texts.set(block, { at: this.player.position, tokens: answer.tokens });
        if (this.cursor === block) this.refreshTip();
      } catch { /* the tip stays without text */ }
    }, 120);
  }

  // -- controls ------------------------------------------------------------------------------------------------------

  setMode(mode) {
    for (const button of $("modes").children) {
      const on = button.dataset.mode === mode;
      button.setAttribute("aria-checked", String(on));
      button.tabIndex = on ? 0 : -1;
    }
    this.grid.setMode(mode);
    if (this.player.map) showLegend($("legend"), this.player.map, mode);
  }

  recolour() {
    readTheme();
    this.grid?.markAll();
    this.overlay?.plan();
    if (this.player?.map) {
      this.panels();
      this.scrubber();
    }
  }

  #resize() {
    const width = $("scroller").clientWidth;
    if (width !== this.width) {
      this.width = width;
      this.grid.layout();
    }
    this.overlay.layout();
    if (this.player.map) this.scrubber();
  }

  #controls() {
    const { player } = this;
    $("time").addEventListener("input", (event) => (player.stop(), player.seek(Number(event.target.value))));
    $("back").addEventListener("click", () => (player.stop(), player.seek(player.position - 1)));
    $("forward").addEventListener("click", () => (player.stop(), player.seek(player.position + 1)));
    $("play").addEventListener("click", () => this.toggle());
    $("live").addEventListener("click", () => player.follow());
    $("deselect").addEventListener("click", () => this.select(null));
    $("modes").addEventListener("click", (event) => event.target.dataset.mode && this.setMode(event.target.dataset.mode));
    for (const box of [$("modes"), $("groups")]) box.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!move) return;
      event.preventDefault();
      event.stopPropagation();
      const all = [...box.children], at = all.findIndex((b) => b.getAttribute("aria-checked") === "true");
      const next = all[(at + move + all.length) % all.length];
      next.click();
      next.focus();
    });
    const zoom = (by) => {
      this.grid.zoom += by;
      this.grid.layout();
      this.overlay.layout();
    };
    $("smaller").addEventListener("click", () => zoom(-1));
    $("larger").addEventListener("click", () => zoom(1));
    $("help-button").addEventListener("click", () => $("help").showModal());
  }

  toggle() {
    const { player } = this;
    if (player.following || player.playing) player.pause();
    else if (this.run) player.play();
    else player.follow();
  }

  #pointer() {
    const { canvas } = this.grid, stage = $("stage");
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return this.grid.blockAt(event.clientX - box.left, event.clientY - box.top);
    };
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType === "touch") return;
      this.moveCursor(at(event), { x: event.clientX, y: event.clientY });
    });
    canvas.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && this.moveCursor(-1));
    canvas.addEventListener("click", (event) => {
      const block = at(event);
      if (block < 0) return;
      this.moveCursor(block, { x: event.clientX, y: event.clientY });
      this.followBlock(block);
    });
    stage.addEventListener("pointermove", (event) => {
      const box = $("strip-space").getBoundingClientRect();
      const logical = $("strip").hidden ? -1 : this.overlay.logicalAt(event.clientX - box.left, event.clientY - box.top - 2);
      this.overlay.setHovered(logical);
      if (logical >= 0 && this.overlay.table.ids[logical] >= 0) {
        this.moveCursor(this.overlay.table.ids[logical], { x: event.clientX, y: event.clientY });
      } else if (event.target !== canvas) this.hideTip();
    });
    stage.addEventListener("pointerleave", () => this.overlay.setHovered(-1));
    document.addEventListener("pointerdown", (event) => event.target !== canvas && this.hideTip());
  }

  #keys() {
    const { canvas } = this.grid;
    canvas.addEventListener("keydown", (event) => {
      const { map } = this.player;
      if (!map) return;
      const columns = this.grid.columns;
      const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, PageDown: columns * 8, PageUp: -columns * 8 }[event.key];
      if (move !== undefined || event.key === "Home" || event.key === "End") {
        event.preventDefault();
        event.stopPropagation();
        const to = event.key === "Home" ? 0 : event.key === "End" ? map.numBlocks - 1 : this.cursor < 0 ? 0 : this.cursor + move;
        if (to < 0 || to >= map.numBlocks) return;
        this.#reveal(to);
        this.moveCursor(to);
        this.say(this.spoken);
      } else if (event.key === "Enter" && this.cursor >= 0) this.followBlock(this.cursor);
    });
    canvas.addEventListener("blur", () => this.hideTip());
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
      const typing = event.target.matches("input[type=search], input[type=password]");
      if (event.key === "Escape") {
        this.hideTip();
        this.select(null);
        if (typing) event.target.blur();
      } else if (typing) return;
      else if (event.key === " " && !event.target.matches("button")) (event.preventDefault(), this.toggle());
      else if (event.key === "/") (event.preventDefault(), $("search").focus());
      else if (event.key === "?") $("help").showModal();
      else if (event.key === "m") this.setMode(MODES[(MODES.indexOf(this.grid.mode) + 1) % MODES.length]);
      else if (event.key === "t") $("theme").click();
      else if (event.key === "l") this.player.follow();
    });
  }

  #reveal(block) {
    const [, y] = this.grid.cornerOf(block), view = $("scroller");
    if (y < view.scrollTop) view.scrollTop = y;
    else if (y + this.grid.size > view.scrollTop + view.clientHeight) view.scrollTop = y + this.grid.size - view.clientHeight;
  }

  // -- where the frames come from --------------------------------------------------------------------------------------

  status(state = this.lineState) {
    this.lineState = state;
    const { player } = this, pill = $("status");
    const shown = this.run ? "recorded" : state === "live" && !player.following ? "paused" : state;
    if (pill.dataset.state === shown) return;
    pill.dataset.state = shown;
    pill.textContent = { locked: "needs a key", waiting: "waiting for the engine", reconnecting: "connection lost, trying again", recorded: "recorded run" }[shown] ?? shown;
  }

  live() {
    const stream = new Stream("/blocks/events", {
      event: (name, data, size) => {
        if (name === "hello") {
          this.hello = data;
          $("model").textContent = data.model ?? "";
          this.status("live");
          $("key-button").hidden = !key.get();
          this.#report();
        } else if (name === "frame") this.take(data, size);
        else if (name === "stopped") this.status("engine stopped");
      },
      state: (state, words) => {
        this.status(state);
        if (words) $("empty").textContent = words;
      },
      key: (wrong) => this.askKey(wrong),
    });
    $("key-button").addEventListener("click", async () => {
      if (this.keyWanted) return this.keyWanted();
      await this.askKey(false);
      stream.abort?.abort();
    });
    stream.run().catch((error) => this.status(error.message));
    setInterval(() => document.hidden || this.#report(), 5000);
  }

  async #report() {
    if (this.lineState !== "live" || !this.player.following) return;
    try {
      showRun($("waste-run"), await getJSON("/blocks/report?finished=0&samples=0"));
    } catch { /* the next one will tell */ }
  }

  /** Ask until there is one. Whoever closes the question finds it again behind the button. */
  askKey(wrong) {
    const dialog = $("key-dialog");
    $("key-error").textContent = wrong ? "That key was refused." : "";
    if (!dialog.open) dialog.showModal();
    return new Promise((done) => {
      dialog.addEventListener("close", () => {
        const given = $("key").value.trim();
        $("key").value = "";
        if (given) return key.set(given), done();
        if (key.get() && !wrong) return done(); // the old one stays
        $("key-button").hidden = false;
        this.keyWanted = () => {
          this.keyWanted = null;
          done(this.askKey(wrong));
        };
      }, { once: true });
    });
  }

  /** A run that the page carries: everything is there, nothing is asked for. */
  async recorded(text) {
    const packed = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
    const plain = new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip")));
    this.run = await plain.json();
    this.run.texts = new Map();
    document.body.classList.add("recorded");
    $("model").textContent = this.run.title;
    this.player.following = false;
    const { history } = this.player;
    Object.assign(history, { maxFrames: Infinity, maxBytes: Infinity });
    let fullest = 0, most = -1;
    for (const frame of this.run.frames) {
      this.take(frame, 0);
      if (this.run.tokens) this.#rememberTexts(frame, history.head);
      const used = frame.stats[history.head.statIndex.used];
      if (used > most) [fullest, most] = [history.last, used];
    }
    this.player.seek(fullest);
    showRun($("waste-run"), this.run.report);
    this.status("recorded");
  }

  /** Text of published content by its hash, so that a cached block can still be read. */
  #rememberTexts(frame, map) {
    for (let i = 0; i < frame.keys.length; i += 4) {
      const owner = map.ownersOf(frame.keys[i])[0];
      if (!owner || frame.keys[i + 1] < 0) continue;
      const from = owner.logical * map.blockSize;
      this.run.texts.set(frame.keys[i + 2], this.run.tokens[owner.seq]?.slice(from, from + map.blockSize));
    }
  }
}

readTheme();
const page = new Page();
globalThis.octavo = page; // for the console, and for tests
const carried = document.getElementById("octavo-run");
if (carried) page.recorded(carried.textContent);
else page.live();
