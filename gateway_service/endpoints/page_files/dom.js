// Elements and numbers for people. Texts become text nodes, never markup.

export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

// Changes a text only if it differs: what a reader has selected stays.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const count = (number) => Math.round(number).toLocaleString("en");

export const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

const digits = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

export function seconds(value) {
  if (value >= 1) return `${digits(value)}\u00a0s`;
  if (value >= 0.001) return `${digits(value * 1e3)}\u00a0ms`;
  return value > 0 ? `${digits(value * 1e6)}\u00a0µs` : "0\u00a0s";
}

export function duration(value) {
  if (value < 100) return `${Math.round(value)} s`;
  if (value < 6000) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${Math.round(value / 86400)} d`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)}\u00a0${units[unit]}`;
}

// Rates of links count in powers of ten, as their makers do.
export function byteRate(value) {
  for (const [unit, size] of [["GB/s", 1e9], ["MB/s", 1e6], ["kB/s", 1e3]]) {
    if (value >= size) return `${digits(value / size)}\u00a0${unit}`;
  }
  return `${Math.round(value)}\u00a0B/s`;
}

export const percent = (share) => `${Math.round(share * 100)}\u00a0%`;

export const rate = (value) => (value >= 10 ? count(value) : value > 0 ? value.toFixed(1) : "0");
