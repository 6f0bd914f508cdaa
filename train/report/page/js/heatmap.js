// A matrix of values between 0 and 1 (or a given maximum), drawn on a canvas, with exact values on
// hover and on keyboard focus. Cells that do not exist stay blank.

import { colour, h, number, onTheme, onWidth } from "report/dom.js";

/** The colour of a share of the maximum: four stops of the theme, evenly spaced; another below 0. */
function scale(share) {
  const names = ["--scale-0", "--scale-1", "--scale-2", "--scale-3"];
  const stops = (share < 0 ? ["--scale-0", "--scale-negative"] : names).map((name) =>
    colour(name)
      .match(/[\d.]+/g)
      .map(Number),
  );
  const place = Math.min(Math.abs(share), 1) * (stops.length - 1);
  const i = Math.min(Math.floor(place), stops.length - 2);
  const mix = stops[i].slice(0, 3).map((a, k) => a + (place - i) * (stops[i + 1][k] - a));
  return mix;
}

function readable([r, g, b]) {
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#111" : "#fff";
}

/**
 * `label` for screen readers, `describe(row, column, value)` for the line below, and whether a cell
 * `isOpen(row, column)` and gets a dot. `set` takes rows of numbers, null where there is no cell.
 */
export class Heatmap {
  constructor({ label, describe, isOpen = () => false }) {
    this.describe = describe;
    this.isOpen = isOpen;
    this.cursor = { row: 0, column: 0 };
    this.readout = h("output", { class: "readout", "aria-live": "polite" });
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.area = h(
      "div",
      {
        class: "heatmap-area",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "heatmap",
        "aria-label": `${label}. Arrow keys move between cells.`,
      },
      this.canvas,
    );
    this.legend = h("div", { class: "legend" });
    this.element = h("div", { class: "heatmap" }, this.area, this.legend, this.readout);
    this.area.addEventListener("keydown", (event) => this.onKey(event));
    this.area.addEventListener("focus", () => {
      this.active = true;
      this.paint();
      this.show();
    });
    this.canvas.addEventListener("pointermove", (event) => this.onPointer(event));
    this.canvas.addEventListener("pointerdown", (event) => this.onPointer(event));
    onWidth(this.area, (width) => {
      this.width = width;
      this.paint();
    });
    onTheme(() => this.paint());
  }

  set(matrix, rowNames, columnNames) {
    Object.assign(this, { matrix, rowNames, columnNames });
    const values = matrix.flat().filter((value) => value !== null);
    // Not Math.max(...values): there may be more of them than a call takes arguments.
    this.max = values.reduce((a, b) => Math.max(a, Math.abs(b)), 1e-12);
    this.min = values.reduce((a, b) => Math.min(a, b), 0);
    // Among many sources most weights are small, and the first read's is 1.
    this.power = columnNames.length > 24 ? 0.5 : 1;
    const { row, column } = this.cursor;
    if (!this.has(row, column)) this.cursor = { row: 0, column: 0 };
    this.paint();
    this.show();
  }

  has(row, column) {
    return (this.matrix[row]?.[column] ?? null) !== null;
  }

  strength(share) {
    return Math.sign(share) * Math.abs(share) ** this.power;
  }

  layout() {
    const longest = Math.max(...this.rowNames.map((name) => name.length));
    const left = Math.min(longest * 6.6 + 12, this.width * 0.36);
    const columns = this.columnNames.length;
    // Slanted names reach beyond the last column.
    const right = this.width / columns < 90 ? this.columnNames.at(-1).length * 4.2 : 2;
    const cell = Math.min(72, (this.width - left - right) / columns);
    const height = Math.max(2.5, Math.min(30, cell * 1.2, 720 / this.rowNames.length));
    // Names are slanted where columns are narrower than they are, and left out where too narrow.
    const names = this.columnNames.map((name) => name.length);
    const slanted = Math.max(...names) * 6.6 > cell - 6;
    const top = cell < 11 ? 8 : slanted ? Math.min(110, Math.max(...names) * 4.8 + 22) : 26;
    return { left, top, cell, height, slanted, columns };
  }

  paint() {
    if (!this.matrix || !this.width) return;
    const { left, top, cell, height, slanted, columns } = (this.place = this.layout());
    const ratio = devicePixelRatio || 1;
    const total = { width: this.width, height: top + height * this.rowNames.length + 2 };
    this.canvas.width = total.width * ratio;
    this.canvas.height = total.height * ratio;
    this.canvas.style.height = `${total.height}px`;
    this.canvas.style.width = `${total.width}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const gap = cell > 8 && height > 8 ? 1 : 0;
    const shades = new Map();
    this.matrix.forEach((values, row) => {
      values.forEach((value, column) => {
        if (value === null) return;
        const key = Math.round((value / this.max) * 255);
        if (!shades.has(key)) shades.set(key, scale(this.strength(key / 255)));
        const shade = shades.get(key);
        pen.fillStyle = `rgb(${shade.map(Math.round)})`;
        const [x, y] = [left + column * cell, top + row * height];
        pen.fillRect(x, y, cell - gap + (gap ? 0 : 0.3), height - gap + (gap ? 0 : 0.3));
        if (cell >= 40 && height >= 18) {
          pen.fillStyle = readable(shade);
          pen.font = `12px ${this.font()}`;
          pen.textAlign = "center";
          pen.fillText(value.toFixed(2), x + cell / 2, y + height / 2 + 4);
        }
        if (cell >= 12 && height >= 10 && this.isOpen(row, column)) {
          pen.fillStyle = readable(shade);
          pen.beginPath();
          pen.arc(x + cell - 6, y + 6, 2, 0, 2 * Math.PI);
          pen.fill();
        }
      });
    });
    this.paintNames(pen, { left, top, cell, height, slanted, columns });
    this.paintCursor(pen, { left, top, cell, height });
    this.paintLegend();
  }

  font() {
    return getComputedStyle(document.body).fontFamily;
  }

  paintNames(pen, { left, top, cell, height, slanted }) {
    pen.fillStyle = colour("--muted");
    pen.font = `12px ${this.font()}`;
    pen.textAlign = "right";
    const every = Math.ceil(13 / height);
    this.rowNames.forEach((name, row) => {
      const last = this.rowNames.length - 1;
      if (row !== last && (row % every || last - row < every)) return;
      pen.fillText(name, left - 8, top + (row + 0.5) * height + 4, left - 10);
    });
    if (cell < 11) return;
    this.columnNames.forEach((name, column) => {
      const x = left + (column + 0.5) * cell;
      pen.save();
      pen.translate(x, top - 8);
      if (slanted) pen.rotate(-Math.PI / 4);
      pen.textAlign = slanted ? "left" : "center";
      pen.fillText(name, 0, 0);
      pen.restore();
    });
  }

  paintCursor(pen, { left, top, cell, height }) {
    const { row, column } = this.cursor;
    if (!this.active) return;
    pen.strokeStyle = colour("--ink");
    pen.lineWidth = 2;
    pen.strokeRect(left + column * cell, top + row * height, cell, height);
  }

  paintLegend() {
    const stops = [0, 1, 2, 3].map((i) => `var(--scale-${i})`).join(", ");
    const below = {
      style: "background: linear-gradient(to left, var(--scale-0), var(--scale-negative))",
    };
    const parts = [
      ...(this.min < 0
        ? [h("span", {}, number(-this.max, 3)), h("span", { class: "legend-bar", ...below })]
        : []),
      h("span", {}, "0"),
      h("span", { class: "legend-bar", style: `background: linear-gradient(to right, ${stops})` }),
      h("span", {}, number(this.max, 3)),
      this.power === 1 ? null : h("span", {}, "(colour: square root)"),
      h("span", { class: "legend-blank" }, "blank: no such source"),
    ];
    this.legend.replaceChildren(...parts.filter((part) => part !== null));
  }

  onPointer(event) {
    const { left, top, cell, height } = this.place;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - left) / cell);
    const row = Math.floor((event.clientY - box.top - top) / height);
    if (this.has(row, column)) this.move(row, column);
  }

  onKey(event) {
    const { row, column } = this.cursor;
    const moves = {
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      Home: [row, 0],
      End: [row, this.matrix[row].findLastIndex((value) => value !== null)],
    };
    const to = moves[event.key];
    if (!to) return;
    event.preventDefault();
    // Upwards a row may have fewer sources: the last of them is nearest.
    const last = this.matrix[to[0]]?.findLastIndex((value) => value !== null) ?? -1;
    if (last >= 0) this.move(to[0], Math.max(0, Math.min(to[1], last)));
  }

  move(row, column) {
    this.active = true;
    const changed = row !== this.cursor.row || column !== this.cursor.column;
    this.cursor = { row, column };
    if (changed || !this.readout.textContent) this.paint();
    this.show();
  }

  show() {
    const { row, column } = this.cursor;
    if (!this.matrix) return;
    this.readout.textContent = this.describe(row, column, this.matrix[row][column]);
  }
}
