// Section 4: which sources each read has, step by step, in Block and in Full.

import { drawRead } from "report/block_drawing.js";
import { badge, choice, numberField, selectField } from "report/controls.js";
import { array, readName, runs } from "report/data.js";
import { bytes, h, number, onTheme, onWidth, plural, s } from "report/dom.js";
import { cacheBytes, sourceCount, sourcesOfRead } from "report/maths.js";
import { Player } from "report/player.js";

const own =
  runs.find((run) => run.residual === "block") ??
  runs.find((run) => run.residual === "full") ??
  runs[0];

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
    (run) =>
      run.numSublayers === state.L && run.blockSize === blockSize() && array(run, "depth_weights"),
  );
}

function peak(size) {
  let most = 0;
  for (let read = 0; read <= state.L; read += 1) {
    most = Math.max(most, sourceCount(read, state.L, size));
  }
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
  if (state.mode === "full") return "Its output becomes a source of its own.";
  const block = Math.floor(read / state.S) + 1;
  const opens = read % state.S === 0 ? "opens the partial sum" : "is added to the partial sum";
  const seals = (read + 1) % state.S === 0 || read + 1 === state.L;
  return `Its output ${opens}${seals ? `, which seals block ${block}` : ""}.`;
}

function describe(read) {
  const { names } = sourceNames(read);
  const shown =
    names.length > 5
      ? `embedding and ${names.length - 2} more, last ${names.at(-1)}`
      : names.join(", ");
  const what =
    read === state.L
      ? "Final read, before the last norm and the head"
      : `Read ${read + 1} of ${state.L + 1}, ${readName(read, state.L)}`;
  return `${what}: ${plural(names.length, "source")} (${shown}). ${fate(read)}`;
}

// ------------------------------------------------------------------ counters and controls

function counters(read) {
  const size = blockSize();
  const count = sourceCount(read, state.L, size);
  const inBytes = (sources) =>
    bytes(cacheBytes(sources, state.tokens, state.width, state.bytesPerNumber));
  const item = (name, value, note) =>
    h("div", { class: "counter" }, h("dt", {}, name), h("dd", {}, value, h("small", {}, note)));
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
      const run = matchingRun();
      drawRead(svg, {
        ...sourceNames(read),
        read,
        numSublayers: state.L,
        size: blockSize(),
        most: peak(blockSize()),
        isFull: state.mode === "full",
        weights: run ? array(run, "depth_weights")[read] : null,
        label: describe(read),
      });
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
        ? badge(
            "measured",
            `links are as wide as the mean depth weights of ${run.name}, step ${run.diagnostics.step}; sources and bytes follow from L and S`,
          )
        : badge(
            "computed",
            "sources and bytes follow from L and S; links are of equal width, as at zero pseudo-queries",
          ),
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
    tokens: numberField("Tokens T", {
      min: 1,
      max: 10_000_000,
      value: state.tokens,
      onchange: change("tokens"),
    }),
    width: numberField("Width D", {
      min: 1,
      max: 100_000,
      value: state.width,
      onchange: change("width"),
    }),
  };
  const dtype = selectField(
    "Numbers",
    [
      { value: 2, text: "2 bytes" },
      { value: 4, text: "4 bytes" },
    ],
    change("bytesPerNumber"),
  );
  dtype.select.value = String(state.bytesPerNumber);
  const modes = choice(
    "Block or Full",
    [
      { value: "block", text: "Block" },
      { value: "full", text: "Full" },
    ],
    (mode) => {
      state.mode = mode;
      update();
    },
  );
  figure.append(
    h(
      "div",
      { class: "row" },
      modes.element,
      ...Object.values(fields).map((field) => field.element),
      dtype.element,
      blocks,
    ),
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
