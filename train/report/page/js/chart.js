// Lines over depth or steps: uPlot, with exact values on hover and on keyboard focus.

import { colour, h, number, onTheme, onWidth } from "report/dom.js";

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500];

/** Of the places that uPlot offers on a logarithmic axis: powers of 10, and 2 and 5 in a short one. */
function roundPlaces(plot, splits) {
  const short = Math.log10(splits.at(-1) / splits[0]) < 2;
  const kept = short ? [1, 2, 5] : [1];
  return splits.map((y) => {
    const leading = y / 10 ** Math.floor(Math.log10(y) + 1e-9);
    return kept.some((one) => Math.abs(leading - one) < 1e-6) ? y : null;
  });
}

/**
 * `lines`: [{ name, colour, x, y, dash, points }]; a y of null leaves a gap. `xName(x)` names a
 * place for the line of values.
 */
export function chart({
  label,
  lines,
  xLabel,
  yLabel,
  xName,
  log = false,
  logX = false,
  steps = false,
  height = 260,
}) {
  const values = h("div", { class: "chart-values" });
  const announcement = h("output", { class: "visually-hidden", "aria-live": "polite" });
  const area = h("div", {
    class: "chart-area",
    tabindex: 0,
    role: "application",
    "aria-roledescription": "line chart",
    "aria-label": `${label}. Left and right arrow keys read out the values.`,
  });
  const element = h("div", { class: "chart" }, values, area, announcement);
  const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const columns = lines.map((line) => {
    const column = xs.map(() => undefined); // uPlot joins across undefined and breaks at null.
    line.x.forEach((x, i) => {
      const y = line.y[i];
      column[place.get(x)] = y === null || (log && y <= 0) ? null : y;
    });
    return column;
  });

  const ruled = { grid: { stroke: () => colour("--rule"), width: 1 } };
  const axis = (name, extra) => ({
    stroke: () => colour("--muted"),
    ...ruled,
    ticks: { stroke: () => colour("--rule"), width: 1, size: 4 },
    font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif",
    label: name,
    labelSize: 18,
    ...extra,
  });
  const options = {
    width: 300,
    height,
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
    scales: { x: { time: false, ...(logX ? { distr: 3 } : {}) }, y: log ? { distr: 3 } : {} },
    axes: [
      axis(xLabel, {
        size: 36,
        ...(steps ? { incrs: WHOLE, space: 32 } : {}),
        ...(logX ? { filter: roundPlaces, grid: { ...ruled.grid, filter: roundPlaces } } : {}),
      }),
      axis(yLabel, {
        size: 58,
        values: (_, splits) => splits.map((y) => (y === null ? "" : number(y, 3))),
        ...(log ? { filter: roundPlaces, grid: { ...ruled.grid, filter: roundPlaces } } : {}),
      }),
    ],
    series: [
      {},
      ...lines.map((line) => ({
        stroke: () => colour(line.colour),
        width: line.width ?? 2,
        dash: line.dash,
        points: {
          show: line.points ?? false,
          size: 6,
          fill: () => colour(line.points === "only" ? line.colour : "--card"),
        },
        paths: line.points === "only" ? () => null : undefined,
      })),
    ],
    hooks: { setCursor: [(plot) => show(plot.cursor.idx)] },
  };
  const plot = new uPlot(options, [xs, ...columns], area);
  let index = null;

  function show(now) {
    index = now ?? null;
    const nearest = (column) => {
      for (let i = index; i >= 0; i -= 1) if (column[i] !== undefined) return column[i];
      return undefined;
    };
    values.replaceChildren(
      h("span", { class: "chart-x" }, index === null ? label : xName(xs[index])),
      ...lines.map((line, i) =>
        h(
          "span",
          { class: "chart-value" },
          h("span", {
            class: line.dash ? "key key-dashed" : "key",
            style: `--key: var(${line.colour})`,
          }),
          line.name,
          index === null ? null : h("b", {}, shown(nearest(columns[i]))),
        ),
      ),
    );
  }
  const shown = (value) => (value === undefined ? "" : ` ${number(value, 5)}`);

  area.addEventListener("keydown", (event) => {
    const last = xs.length - 1;
    const from = index ?? (event.key === "ArrowLeft" ? last + 1 : -1);
    const moves = { ArrowRight: from + 1, ArrowLeft: from - 1, Home: 0, End: last };
    if (moves[event.key] === undefined) return;
    event.preventDefault();
    const to = Math.max(0, Math.min(moves[event.key], last));
    plot.setCursor({ left: plot.valToPos(xs[to], "x"), top: 10 });
    show(to);
    announcement.textContent = values.textContent;
  });
  onWidth(area, (width) => plot.setSize({ width, height }));
  onTheme(() => plot.redraw());
  show(null);
  return { element, plot };
}
