// Elements, numbers and theme colours.

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** An HTML element; `onclick` and the like are listeners, `text` its text. */
export function h(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function s(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

let nextId = 0;
export function uniqueId(prefix) {
  nextId += 1;
  return `${prefix}-${nextId}`;
}

// ------------------------------------------------------------------ numbers

/** Enough digits to tell values apart, never more than were measured. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "none";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(digits - 1);
  return value
    .toPrecision(digits)
    .replace(/(\.\d*?)0+$/, "$1")
    .replace(/\.$/, "");
}

export function integer(value) {
  return value === null || value === undefined ? "unknown" : value.toLocaleString("en-US");
}

const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
export function bytes(value) {
  let unit = 0;
  let size = value;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return unit === 0 ? `${integer(size)} bytes` : `${number(size)} ${UNITS[unit]}`;
}

export function plural(count, word) {
  return `${integer(count)} ${word}${count === 1 ? "" : "s"}`;
}

// ------------------------------------------------------------------ theme

const probe = h("span", { hidden: true });
let cache = new Map();
const listeners = new Set();

/** The computed value of a colour of style.css, such as "--ink". */
export function colour(name) {
  if (!probe.isConnected) document.body.append(probe);
  if (!cache.has(name)) {
    probe.style.color = `var(${name})`;
    cache.set(name, getComputedStyle(probe).color);
  }
  return cache.get(name);
}

/** Calls back whenever the colours have changed. */
export function onTheme(callback) {
  listeners.add(callback);
}

export function themeChanged() {
  cache = new Map();
  for (const callback of listeners) callback();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);

/** Calls back with an element's width now and whenever it changes. */
export function onWidth(element, callback) {
  let width = 0;
  new ResizeObserver(() => {
    const now = Math.floor(element.clientWidth);
    if (now > 0 && now !== width) callback((width = now));
  }).observe(element);
}

export const RUN_COLOURS = ["--run-1", "--run-2", "--run-3", "--run-4", "--run-5", "--run-6"];
