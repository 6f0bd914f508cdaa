// Section 4: which sources each read has, step by step, in Block and in Full.

import { badge, choice, numberField, selectField } from "report/controls.js";
import { array, readName, runs, sublayerName } from "report/data.js";
import { bytes, h, number, onTheme, onWidth, plural, s } from "report/dom.js";
import { cacheBytes, sourceCount, sourcesOfRead } from "report/maths.js";
import { Player } from "report/player.js";

const own = runs.find((run) => run.residual === "block") ?? runs.find((run) => run.residual === "full") ?? runs[0];

const state = {
  L: own.numSublayers,
  S: own.blockSize ?? 4,
  mode: "block",
  tokens: own.context,
  width: own.width,
  bytesPerNumber: own.dtype === "float32" ? 4 : 2,
};

const blockSize = () => (state.mode === "full" ? 1 : state.S);

/** The given run that has exactly these blocks, whose weights the links then show. */
function matchingRun() {
  return runs.find(
    (run) => run.numSublayers === state.L && run.blockSize === blockSize() && array(run, "depth_weights"),
  );
}

function peak(size) {
  let most = 0;
  for (let read = 0; read <= state.L; read += 1) most = Math.max(most, sourceCount(read, state.L, size));
  return most;
}

function sourceNames(read) {
  const { finished, open } = sourcesOfRead(read, state.L, blockSize());
  const names = ["embedding"];
  for (let n = 1; n < finished; n += 1) {
    names.push(state.mode === "full" ? `output ${n}` : `block ${n}`);
  }
  if (open) names.push(`partial sum of ${plural(open, "output")}`);
  return { names, finished, open };
}

/** What becomes of the output of the sub-layer behind a read. */
function fate(read) {
  if (read === state.L) return "";
  if (state.mode === "full") return `Its output becomes a source of its own.`;
  const block = Math.floor(read / state.S) + 1;
  const opens = read % state.S === 0 ? "opens the partial sum" : "is added to the partial sum";
  const seals = (read + 1) % state.S === 0 || read + 1 === state.L;
  return `Its output ${opens}${seals ? `, which seals block ${block}` : ""}.`;
}

function describe(read) {
  const { names } = sourceNames(read);
  const shown = names.length > 5 ? `embedding and ${names.length - 2} more, last ${names.at(-1)}` : names.join(", ");
  const what = read === state.L ? "Final read, before the last norm and the head" : `Read ${read + 1} of ${state.L + 1}, ${readName(read, state.L)}`;
  return `${what}: ${plural(names.length, "source")} (${shown}). ${fate(read)}`;
}

// ------------------------------------------------------------------ the drawing

function draw(svg, read) {
  const width = svg.parentElement.clientWidth;
  if (!width) return;
  const { names, finished, open } = sourceNames(read);
  const size = blockSize();
  const run = matchingRun();
  const weights = run && array(run, "depth_weights")[read];
  const narrow = width < 560;
  const perLine = Math.max(1, Math.min(state.L, Math.floor((width - 8) / Math.max(12, Math.min(52, (width - 8) / state.L)))));
  const tile = Math.min(60, (width - 8) / perLine);
  const tileHeight = Math.min(22, Math.max(10, tile - 3));
  const lines = Math.ceil(state.L / perLine);
  const trackTop = 28;
  const sourcesTop = trackTop + lines * (tileHeight + 4) + 34;
  const most = peak(size);
  const bar = Math.max(2.5, Math.min(30, 320 / most));
  const height = sourcesTop + Math.max(most * bar, 96) + 16;
  const sourceWidth = narrow ? width * 0.42 : Math.min(250, width * 0.34);
  const readX = narrow ? width * 0.62 : width * 0.56;
  const readY = sourcesTop + Math.max(most * bar, 96) / 2;
  const parts = [];

  parts.push(s("text", { x: 4, y: 16, class: "svg-label" }, `${plural(state.L, "sub-layer")}${tile >= 30 ? ": A attention, M MLP" : ""}`));
  for (let i = 0; i < state.L; i += 1) {
    const block = Math.floor(i / size);
    const x = 4 + (i % perLine) * tile;
    const y = trackTop + Math.floor(i / perLine) * (tileHeight + 4);
    const done = i < read;
    const classes = ["tile", block % 2 ? "tile-odd" : "tile-even"];
    if (done) classes.push(block < finished - 1 ? "tile-sealed" : "tile-open");
    if (i === read) classes.push("tile-now");
    const first = i % size === 0;
    parts.push(
      s("rect", { x: x + (first ? 2 : 0.5), y, width: tile - (first ? 3 : 1.5), height: tileHeight, rx: 3, class: classes.join(" ") }, s("title", {}, `${sublayerName(i)}, block ${block + 1}`)),
    );
    if (tile >= 30) {
      const text = `${"AM"[i % 2]}${Math.floor(i / 2) + 1}`;
      const on = done ? "svg-tile svg-tile-done" : "svg-tile";
      parts.push(s("text", { x: x + tile / 2, y: y + tileHeight / 2 + 4, class: on }, text));
    }
  }

  parts.push(s("text", { x: 4, y: sourcesTop - 10, class: "svg-label" }, "sources"));
  names.forEach((name, i) => {
    const y = sourcesTop + i * bar;
    const isOpen = i === names.length - 1 && open > 0;
    const boxHeight = Math.max(1.5, bar - (bar > 8 ? 4 : 1));
    const kind = i === 0 ? "source-embedding" : isOpen ? "source-open" : i % 2 ? "source-even" : "source-odd";
    const weight = weights ? weights[i] : 1 / names.length;
    const middle = y + boxHeight / 2;
    const bend = (readX - sourceWidth) / 2;
    parts.push(
      s("path", {
        d: `M ${sourceWidth + 4} ${middle} C ${sourceWidth + bend} ${middle}, ${readX - bend} ${readY}, ${readX - 16} ${readY}`,
        class: `link ${isOpen ? "link-open" : ""}`,
        "stroke-width": Math.max(0.6, weight * 16),
      }),
      s("rect", { x: 4, y, width: sourceWidth, height: boxHeight, rx: Math.min(4, boxHeight / 2), class: `source ${isOpen ? "source-frame" : kind}` }),
    );
    if (isOpen) {
      const line = Math.min(bar > 24 ? 6 : 3, boxHeight);
      parts.push(s("rect", { x: 4, y: y + boxHeight - line, width: (sourceWidth * open) / size, height: line, rx: line / 2, class: "source source-open" }));
    }
    if (bar >= 15) {
      const short = isOpen ? `partial${narrow ? "" : " sum"}, ${open} of ${size}` : name;
      parts.push(s("text", { x: 12, y: middle + 4, class: `svg-source ${kind}-text` }, short));
      if (!narrow || sourceWidth > 170) {
        parts.push(s("text", { x: sourceWidth - 4, y: middle + 4, class: `svg-source svg-weight ${kind}-text` }, weights ? number(weight, 3) : ""));
      }
    }
  });

  const boxWidth = width - readX - 18;
  const target = read === state.L ? "norm, head" : sublayerName(read);
  parts.push(
    s("circle", { cx: readX, cy: readY, r: 15, class: "read" }),
    s("text", { x: readX, y: readY + 5, class: "svg-read" }, "α"),
    s("path", { d: `M ${readX + 16} ${readY} H ${readX + 30}`, class: "arrow", "marker-end": "url(#arrow)" }),
    s("rect", { x: readX + 38, y: readY - 20, width: boxWidth - 24, height: 40, rx: 6, class: "sublayer" }),
    s("text", { x: readX + 38 + (boxWidth - 24) / 2, y: readY + 5, class: "svg-sublayer" }, target),
  );
  if (read < state.L && !narrow) {
    const seals = (read + 1) % size === 0 || read + 1 === state.L;
    const blockNumber = Math.floor(read / size) + 1;
    const added = state.mode === "full" ? `becomes output ${read + 1}` : open ? "added to the partial sum" : "opens the partial sum";
    parts.push(s("text", { x: width - 4, y: readY + 42, class: "svg-note" }, added));
    if (seals && state.mode !== "full") {
      parts.push(s("text", { x: width - 4, y: readY + 60, class: "svg-note svg-seal" }, `seals block ${blockNumber}`));
    }
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.setAttribute("aria-label", describe(read));
  svg.replaceChildren(
    s("defs", {}, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 4, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto" }, s("path", { d: "M 0 0 L 8 4 L 0 8 z", class: "arrow-head" }))),
    ...parts,
  );
}

// ------------------------------------------------------------------ counters and controls

function counters(read) {
  const size = blockSize();
  const count = sourceCount(read, state.L, size);
  const inBytes = (sources) => bytes(cacheBytes(sources, state.tokens, state.width, state.bytesPerNumber));
  const item = (name, value, note) => h("div", { class: "counter" }, h("dt", {}, name), h("dd", {}, value, h("small", {}, note)));
  const [block, full] = [peak(state.S), peak(1)];
  return [
    item("alive now", plural(count, "source"), inBytes(count)),
    item("most at once, Block", plural(block, "source"), inBytes(block)),
    item("most at once, Full", plural(full, "source"), inBytes(full)),
    item("Full / Block", `${number(full / block, 3)}×`, "of the cache"),
  ];
}

export function start(section) {
  const figure = section.querySelector("#block-figure");
  const svg = s("svg", { role: "img", class: "diagram" });
  const stage = h("div", { class: "stage" }, svg);
  const said = h("output", { class: "readout", "aria-live": "polite" });
  const numbers = h("dl", { class: "counters" });
  const source = h("div");
  const player = new Player(figure, {
    label: "reads of the model",
    count: () => state.L + 1,
    describe,
    draw(read) {
      draw(svg, read);
      said.textContent = describe(read);
      numbers.replaceChildren(...counters(read));
    },
  });
  const blocks = h("span", { class: "hint" });
  const update = () => {
    const count = Math.ceil(state.L / state.S);
    const short = state.L % state.S;
    blocks.textContent = `N = ${plural(count, "block")}${short && count > 1 ? `, the last of ${short}` : ""}`;
    const run = matchingRun();
    source.replaceChildren(
      run
        ? badge("measured", `links are as wide as the mean depth weights of ${run.name}, step ${run.diagnostics.step}; sources and bytes follow from L and S`)
        : badge("computed", "sources and bytes follow from L and S; links are of equal width, as at zero pseudo-queries"),
    );
    player.refresh();
  };
  const change = (name) => (value) => {
    state[name] = Number(value);
    fields.S.input.max = state.L;
    if (state.S > state.L) fields.S.input.value = state.S = state.L;
    update();
  };
  const fields = {
    L: numberField("Sub-layers L", { min: 1, max: 512, value: state.L, onchange: change("L") }),
    S: numberField("Block size S", { min: 1, max: state.L, value: state.S, onchange: change("S") }),
    tokens: numberField("Tokens T", { min: 1, max: 10_000_000, value: state.tokens, onchange: change("tokens") }),
    width: numberField("Width D", { min: 1, max: 100_000, value: state.width, onchange: change("width") }),
  };
  const dtype = selectField("Numbers", [{ value: 2, text: "2 bytes" }, { value: 4, text: "4 bytes" }], change("bytesPerNumber"));
  dtype.select.value = String(state.bytesPerNumber);
  const modes = choice("Block or Full", [{ value: "block", text: "Block" }, { value: "full", text: "Full" }], (mode) => {
    state.mode = mode;
    update();
  });
  figure.append(
    h("div", { class: "row" }, modes.element, ...Object.values(fields).map((field) => field.element), dtype.element, blocks),
    stage,
    said,
    player.controls,
    numbers,
    source,
  );
  modes.start();
  onWidth(stage, () => player.refresh());
  onTheme(() => player.refresh());
}

