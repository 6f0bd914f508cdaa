// Tabs, number fields and notices: the small pieces that every section uses.

import { h, uniqueId } from "report/dom.js";

/**
 * A choice of one, as tabs: arrow keys move, Home and End jump. Calls back with the value at once
 * and on every change.
 */
export function choice(label, options, onchange, selected = options[0]?.value) {
  const list = h("div", { class: "tabs", role: "tablist", "aria-label": label });
  const buttons = options.map(({ value, text, colour }) =>
    h(
      "button",
      { type: "button", role: "tab", class: "tab", onclick: () => select(value, true) },
      colour ? h("span", { class: "swatch", style: `background: var(${colour})` }) : null,
      text,
    ),
  );
  function select(value, focus = false) {
    options.forEach((option, i) => {
      const on = option.value === value;
      buttons[i].setAttribute("aria-selected", String(on));
      buttons[i].tabIndex = on ? 0 : -1;
      if (on && focus) buttons[i].focus();
    });
    onchange(value);
  }
  list.addEventListener("keydown", (event) => {
    const now = buttons.indexOf(document.activeElement);
    const moves = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: buttons.length - 1 };
    if (now < 0 || moves[event.key] === undefined) return;
    event.preventDefault();
    select(options[(moves[event.key] + buttons.length) % buttons.length].value, true);
  });
  list.append(...buttons);
  return { element: list, start: () => select(selected) };
}

/** A whole number that the reader sets; what is out of range is brought back into it. */
export function numberField(label, { min, max, value, onchange }) {
  const id = uniqueId("number");
  const input = h("input", { id, type: "number", min, max, step: 1, value });
  input.addEventListener("change", () => {
    const wanted = Math.round(Number(input.value));
    const clamped = Math.max(Number(input.min), Math.min(wanted || 0, Number(input.max)));
    input.value = clamped;
    onchange(clamped);
  });
  return { element: h("div", { class: "field" }, h("label", { for: id }, label), input), input };
}

export function selectField(label, options, onchange) {
  const id = uniqueId("select");
  const select = h("select", { id, onchange: () => onchange(select.value) });
  select.append(...options.map(({ value, text }) => h("option", { value }, text)));
  return { element: h("div", { class: "field" }, h("label", { for: id }, label), select), select };
}

/** Says what is not shown, and why. */
export function notice(what, why) {
  return h("p", { class: "notice", role: "note" }, h("strong", {}, `${what} `), why);
}

/** "measured", "quoted" or "computed", and of what. */
export function badge(kind, text) {
  return h(
    "p",
    { class: "provenance" },
    h("span", { class: `badge badge-${kind}` }, kind),
    " ",
    text,
  );
}

/**
 * A table that scrolls sideways where it is wide. The first cell of a row is its header; cells are
 * text or elements, and a row may be { cells, class }.
 */
export function table(title, head, rows) {
  const header = h("tr", {}, ...head.map((text) => h("th", { scope: "col" }, text)));
  const body = rows.map((row) => {
    const cells = (row.cells ?? row).map((cell, i) => {
      if (cell instanceof HTMLTableCellElement) return cell;
      return i ? h("td", {}, cell) : h("th", { scope: "row" }, cell);
    });
    return h("tr", { class: row.class }, ...cells);
  });
  return h(
    "div",
    {},
    h("p", { class: "table-title" }, title),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "group", "aria-label": title },
      h("table", { "aria-label": title }, h("thead", {}, header), h("tbody", {}, ...body)),
    ),
  );
}

/** Values as a table, built when it is opened. */
export function valuesTable(caption, build) {
  const details = h("details", { class: "values" }, h("summary", {}, "Values as a table"));
  details.addEventListener("toggle", () => {
    const { head, rows } = build();
    details.querySelector("div")?.remove();
    const csv = [head, ...rows].map((row) => row.map((cell) => `"${cell}"`).join(",")).join("\n");
    const link = h(
      "a",
      {
        download: `${caption}.csv`,
        href: `data:text/csv;charset=utf-8,${encodeURIComponent(csv)}`,
      },
      "Save as CSV",
    );
    details.append(h("div", {}, table(caption, head, rows), link));
  });
  return details;
}
