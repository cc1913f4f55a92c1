// Words and numbers as the page writes them, and a short way to make elements.

const many = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export const number = (value) => many.format(value);

export const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

export function bytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(count) < 1024 || unit === "GiB") return `${unit === "B" ? Math.round(count) : count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
}

export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

/** A sequence as people call it: its request, and which of its samples where there are several. */
export const sequenceName = (seq) => `seq ${seq.id}`;

/** An element with attributes and children; text is never read as markup. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) node.setAttribute(name, value);
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

/** Tokens as text that shows its spaces and ends of line. */
export const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("▁", " ");
