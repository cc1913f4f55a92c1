// Colours: read from the style sheet for the canvases, and one per sequence. Okabe and Ito's palette, which people with
// any of the common kinds of colour blindness can tell apart; lightness differs too.

const PALETTE = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#9a8a78"];
const NAMES = [
  "paper", "ink", "dim", "line", "free", "cached", "used", "used-rest", "shared", "shared-rest", "pending", "accent", "held",
  "old", "young",
];

let colours = {};

/** Colours of the style sheet by name; read again after a change of theme. */
export function readTheme() {
  const style = getComputedStyle(document.documentElement);
  colours = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  mixed.clear();
  return colours;
}

export const colour = (name) => colours[name];

const mixed = new Map();

/** A sequence's colour: eight hues, then the same ones lighter and darker. */
export function sequenceColour(id) {
  const key = id % 24;
  if (!mixed.has(key)) {
    const base = PALETTE[key % 8], turn = Math.floor(key / 8);
    mixed.set(key, turn === 0 ? base : mix(base, turn === 1 ? "#ffffff" : "#000000", 0.38));
  }
  return mixed.get(key);
}

/** `a` with a share of `b`; both #rrggbb. */
export function mix(a, b, share) {
  const channels = [1, 3, 5].map((i) => {
    const x = parseInt(a.slice(i, i + 2), 16), y = parseInt(b.slice(i, i + 2), 16);
    return Math.round(x + (y - x) * share).toString(16).padStart(2, "0");
  });
  return `#${channels.join("")}`;
}

/** Young blocks stand out, old ones fade; logarithmic, since ages differ by powers of ten. */
export function ageColour(age) {
  const share = Math.min(1, Math.log2(1 + age) / 12);
  const key = `a${Math.round(share * 24)}`;
  if (!mixed.has(key)) mixed.set(key, mix(colours.young, colours.old, Math.round(share * 24) / 24));
  return mixed.get(key);
}

/** Black or white, whichever is read better on #rrggbb. */
export function textOn(background) {
  const [r, g, b] = [1, 3, 5].map((i) => (parseInt(background.slice(i, i + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.32 ? "#111418" : "#ffffff";
}

const THEMES = ["auto", "light", "dark"];
const SIGNS = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" };

/** The button that goes through system colours, light, dark. `changed()` is called when the colours are others now. */
export function themeButton(button, changed) {
  const root = document.documentElement;
  const show = (theme) => {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    button.textContent = SIGNS[theme];
    button.setAttribute("aria-label", `Colours: ${theme === "auto" ? "as the system has them" : theme}`);
    changed();
  };
  let theme = recall("octavo-theme") ?? "auto";
  if (!THEMES.includes(theme)) theme = "auto";
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try { localStorage.setItem("octavo-theme", theme); } catch { /* a file without storage: the choice lasts for the page */ }
    show(theme);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme === "auto" && changed());
  show(theme);
}

function recall(name) {
  try { return localStorage.getItem(name); } catch { return null; }
}

export const stillness = matchMedia("(prefers-reduced-motion: reduce)");
