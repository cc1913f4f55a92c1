// Which moment is shown: the newest one as it comes, or one in the past. Knows the history, not the page.

import { History } from "./map.js";

export class Player {
  /** on.show(changed): the shown map is another now, by these blocks or (null) altogether; on.length(): more history. */
  constructor(on, limits) {
    this.on = on;
    this.history = new History(limits);
    this.position = -1;
    this.following = true;
    this.playing = false;
    this.map = null; // the map that is shown; the history's own head while following
  }

  get atEnd() {
    return this.position >= this.history.last;
  }

  /** Take a frame in; shows it while following. */
  push(frame, size) {
    const changed = this.history.push(frame, size);
    if (this.following) {
      this.map = this.history.head;
      this.position = this.history.last;
      this.on.show(changed, frame);
    } else {
      if (this.position < this.history.first) this.seek(this.history.first);
      this.on.length();
    }
  }

  /** Show a moment of the past (or the newest, without following it). */
  seek(position) {
    position = Math.max(this.history.first, Math.min(this.history.last, position));
    if (!this.history.length || (position === this.position && !this.following)) return;
    const next = !this.following && position === this.position + 1;
    this.following = false;
    this.position = position;
    const frame = this.history.at(position);
    if (next && !("pool" in frame)) this.on.show(this.map.apply(frame), frame);
    else {
      this.map = this.history.seek(position);
      this.on.show(null, null);
    }
  }

  /** Back to the newest moment, and on with it. */
  follow() {
    if (!this.history.length) return;
    this.stop();
    this.following = true;
    this.map = this.history.head;
    this.position = this.history.last;
    this.on.show(null, null);
  }

  /** Hold the moment that is shown. */
  pause() {
    if (this.following) this.seek(this.position);
    this.stop();
    this.on.length();
  }

  /** Go on from here, frame by frame. */
  play() {
    if (this.playing || !this.history.length) return;
    if (this.atEnd) this.seek(this.history.first);
    this.playing = true;
    const pause = Math.max(30, Math.min(250, 20000 / this.history.length));
    this.timer = setInterval(() => {
      if (this.atEnd) return this.stop(), this.on.length();
      this.seek(this.position + 1);
    }, pause);
    this.on.length();
  }

  stop() {
    clearInterval(this.timer);
    this.playing = false;
  }
}
