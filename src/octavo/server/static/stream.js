// The line to the server: frames as server-sent events, read with fetch so that the key travels in a header.

const KEY = "octavo-key";

export class Refused extends Error {}

/** Where the key is kept: in this tab's session, or in memory where there is no such thing. */
let memory = "";
export const key = {
  get: () => { try { return sessionStorage.getItem(KEY) ?? memory; } catch { return memory; } },
  set: (value) => {
    memory = value;
    try { sessionStorage.setItem(KEY, value); } catch { /* kept in memory */ }
  },
};

const headers = () => (key.get() ? { Authorization: `Bearer ${key.get()}` } : {});

/** JSON from the server. Throws Refused where the key is missing or wrong. */
export async function getJSON(path, signal) {
  const answer = await fetch(path, { headers: headers(), signal, cache: "no-store" });
  if (answer.status === 401 || answer.status === 403) throw new Refused();
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

/** Read events for ever: on.event(name, data, size) for each, on.state(state, words) when the line comes and goes. */
export class Stream {
  constructor(path, on) {
    Object.assign(this, { path, on, closed: false, wait: 500 });
    document.addEventListener("visibilitychange", () => this.#visibility());
  }

  async run() {
    while (!this.closed) {
      try {
        this.abort = new AbortController();
        const answer = await fetch(this.path, { headers: headers(), signal: this.abort.signal, cache: "no-store" });
        if (answer.status === 401 || answer.status === 403) {
          this.on.state("locked");
          await this.on.key(Boolean(key.get()));
          continue;
        }
        if (answer.status === 503) { // loading, shutting down, or too many watch: the server says which
          const said = await answer.json().catch(() => ({}));
          this.on.state("waiting", said.error?.message);
          await new Promise((go) => setTimeout(go, 1500));
          continue;
        }
        if (!answer.ok) throw new Error(String(answer.status));
        this.wait = 500;
        await this.#read(answer.body.getReader());
      } catch (error) {
        if (error.fatal) throw error;
      }
      if (this.closed) return;
      this.on.state(this.sleeping ? "asleep" : "reconnecting");
      if (this.sleeping) await new Promise((wake) => (this.wake = wake));
      else await new Promise((go) => setTimeout(go, this.wait));
      this.wait = Math.min(10000, this.wait * 2);
    }
  }

  async #read(reader) {
    const decoder = new TextDecoder();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += decoder.decode(value, { stream: true });
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) this.#event(event);
    }
  }

  #event(text) {
    let name = "message", data = "";
    for (const line of text.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (data) this.on.event(name, JSON.parse(data), data.length);
  }

  /** A tab that nobody has looked at for half a minute costs the engine nothing. */
  #visibility() {
    clearTimeout(this.timer);
    if (document.hidden) this.timer = setTimeout(() => {
      this.sleeping = true;
      this.abort?.abort();
    }, 30000);
    else if (this.sleeping) {
      this.sleeping = false;
      this.wait = 500;
      this.wake?.();
    }
  }
}
