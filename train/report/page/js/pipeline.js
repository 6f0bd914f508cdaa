// Section 6: what crosses every hop of a pipeline, naive and with cross-stage caching.

import { badge, numberField, selectField, table } from "report/controls.js";
import { runs } from "report/data.js";
import { bytes, h, number, onWidth, plural, s } from "report/dom.js";
import { hops, paperCached, paperNaive } from "report/maths.js";
import { Player } from "report/player.js";

const own = runs.find((run) => run.residual !== "standard") ?? runs[0];
const state = { P: 4, V: 2, Np: 1, tokens: own.context, width: own.width, bytesPerNumber: 2 };

const total = (list, kind) => list.reduce((sum, hop) => sum + hop[kind], 0);
const blockBytes = () => state.tokens * state.width * state.bytesPerNumber;

function describe(list, step) {
  if (step === 0) {
    return `Before the first hop: stage 1 has the embedding, and ${plural(list.length, "hop")} are to come.`;
  }
  const hop = list[step - 1];
  const pass = Math.floor(hop.chunk / state.P) + 1;
  const kept = hop.has
    ? `it kept ${plural(hop.has, "source")} from its chunk before`
    : "it has none yet";
  return `Hop ${step}, chunk ${hop.chunk} to ${hop.chunk + 1} on stage ${hop.stage + 1}, pass ${pass}: the chunk reads ${plural(hop.needs, "source")}; ${kept}. Naive carries ${hop.naive}, cached ${hop.cached}.`;
}

/** Two bars a hop: grey what naive carries, blue what is new. */
function drawHops(svg, list, step) {
  const width = svg.parentElement.clientWidth;
  if (!width) return;
  const [left, top, height] = [34, 22, 190];
  const most = Math.max(1, ...list.map((hop) => hop.naive));
  const slot = (width - left - 4) / Math.max(1, list.length);
  const y = (value) => top + height - (value / most) * height;
  const parts = [];
  for (let tick = 0; tick <= 4; tick += 1) {
    const value = Math.round((most * tick) / 4);
    parts.push(
      s("line", { x1: left, x2: width, y1: y(value), y2: y(value), class: "svg-rule" }),
      s("text", { x: left - 6, y: y(value) + 4, class: "svg-tick" }, value),
    );
  }
  const every = Math.ceil(18 / slot);
  list.forEach((hop, i) => {
    const x = left + i * slot;
    const bar = Math.max(1, Math.min(26, slot * 0.42));
    const middle = x + slot / 2;
    const reached = i < step;
    const now = i === step - 1 ? " hop-now" : "";
    parts.push(
      s(
        "rect",
        {
          x: middle - bar,
          y: y(hop.naive),
          width: bar,
          height: top + height - y(hop.naive),
          class: `hop-naive${reached ? "" : " hop-waiting"}${now}`,
        },
        s("title", {}, `hop ${i + 1}, naive: ${hop.naive} sources`),
      ),
      s(
        "rect",
        {
          x: middle,
          y: y(hop.cached),
          width: bar,
          height: top + height - y(hop.cached),
          class: `hop-cached${reached ? "" : " hop-waiting"}${now}`,
        },
        s("title", {}, `hop ${i + 1}, cached: ${hop.cached} sources`),
      ),
    );
    if (i % every === 0)
      parts.push(
        s("text", { x: middle, y: top + height + 16, class: "svg-tick svg-middle" }, i + 1),
      );
    if (hop.chunk % state.P === 0) {
      parts.push(
        s("line", { x1: x, x2: x, y1: top - 10, y2: top + height, class: "svg-pass" }),
        s("text", { x: x + 4, y: top - 6, class: "svg-label" }, `pass ${hop.chunk / state.P + 1}`),
      );
    }
  });
  parts.push(
    s(
      "text",
      { x: (left + width) / 2, y: top + height + 32, class: "svg-label svg-middle" },
      "hop",
    ),
  );
  const full = top + height + 40;
  for (const [name, value] of [
    ["viewBox", `0 0 ${width} ${full}`],
    ["width", width],
    ["height", full],
  ])
    svg.setAttribute(name, value);
  svg.setAttribute("aria-label", describe(list, step));
  svg.replaceChildren(...parts);
}

/** Every stage with the sources that it holds after `step` hops. */
function drawStages(place, list, step) {
  const holds = Array(state.P).fill(0);
  const fresh = Array(state.P).fill(0);
  holds[0] = 1;
  for (let chunk = 0; chunk <= step; chunk += 1) {
    const stage = chunk % state.P;
    fresh.fill(0);
    if (chunk > 0) {
      fresh[stage] = list[chunk - 1].cached;
      holds[stage] = list[chunk - 1].needs;
    }
    if (chunk < step) holds[stage] += state.Np; // It ran its chunk before it sent.
  }
  const active = step % state.P;
  const most = state.P * state.V * state.Np + 1;
  place.replaceChildren(
    ...holds.map((count, stage) =>
      h(
        "div",
        { class: stage === active ? "stage-box stage-now" : "stage-box" },
        h("b", {}, `Stage ${stage + 1}`),
        h(
          "span",
          { class: "stage-cache", "aria-hidden": "true" },
          h("span", {
            class: "cache-old",
            style: `width: ${(100 * (count - fresh[stage])) / most}%`,
          }),
          h("span", { class: "cache-new", style: `width: ${(100 * fresh[stage]) / most}%` }),
        ),
        h("small", {}, `${plural(count, "source")}${fresh[stage] ? `, ${fresh[stage]} new` : ""}`),
      ),
    ),
  );
}

function sums(list, step) {
  const seen = list.slice(0, step);
  const [naive, cached] = [total(list, "naive"), total(list, "cached")];
  const { P, V, Np } = state;
  const size = (count) => `${plural(count, "block")}, ${bytes(count * blockBytes())}`;
  const ratio = (a, b) => (b ? `${number(a / b, 3)}×` : "");
  const most = (kind) => Math.max(0, ...list.map((hop) => hop[kind]));
  return table(
    `Sent by one microbatch, forward; backward as much. P = ${P}, V = ${V}, N_p = ${Np}`,
    ["", "naive", "cached", "naive / cached"],
    [
      [
        "so far",
        size(total(seen, "naive")),
        size(total(seen, "cached")),
        ratio(total(seen, "naive"), total(seen, "cached")),
      ],
      ["all hops, counted", size(naive), size(cached), ratio(naive, cached)],
      [
        "largest hop",
        size(most("naive")),
        size(most("cached")),
        ratio(most("naive"), most("cached")),
      ],
      [
        "paper, eq. 7 and 8",
        plural(paperNaive(P, V, Np), "block"),
        plural(paperCached(P, V, Np), "block"),
        ratio(paperNaive(P, V, Np), paperCached(P, V, Np)),
      ],
    ],
  );
}

export function start(section) {
  const figure = section.querySelector("#pipeline-figure");
  const svg = s("svg", { role: "img", class: "diagram" });
  const stage = h("div", { class: "stage" }, svg);
  const stages = h("div", { class: "stages" });
  const said = h("output", { class: "readout", "aria-live": "polite" });
  const numbers = h("div");
  let list = hops(state.P, state.V, state.Np);
  const player = new Player(figure, {
    label: "hops",
    count: () => list.length + 1,
    describe: (step) => describe(list, step),
    draw(step) {
      drawHops(svg, list, step);
      drawStages(stages, list, step);
      said.textContent = describe(list, step);
      numbers.replaceChildren(sums(list, step));
    },
  });
  const change = (name) => (value) => {
    state[name] = Number(value);
    list = hops(state.P, state.V, state.Np);
    player.refresh();
  };
  const field = (label, name, max) =>
    numberField(label, { min: 1, max, value: state[name], onchange: change(name) }).element;
  const dtype = selectField(
    "Numbers",
    [
      { value: 2, text: "2 bytes" },
      { value: 4, text: "4 bytes" },
    ],
    change("bytesPerNumber"),
  );
  figure.append(
    h(
      "div",
      { class: "row" },
      field("Stages P", "P", 32),
      field("Virtual stages V", "V", 16),
      field("Blocks per chunk", "Np", 16),
      field("Tokens T", "tokens", 10_000_000),
      field("Width D", "width", 100_000),
      dtype.element,
    ),
    h(
      "p",
      { class: "keys" },
      "Sources in each hop: ",
      h("span", { class: "key", style: "--key: var(--naive)" }),
      "naive, all of them",
      h("span", { class: "key", style: "--key: var(--run-1)" }),
      "cached, only what the stage lacks",
    ),
    stages,
    stage,
    said,
    player.controls,
    numbers,
    badge(
      "computed",
      "counted hop by hop, the embedding included, for chunks that begin and end with a block. The paper's formulas count blocks only, and let a stage receive its own again.",
    ),
  );
  onWidth(stage, () => player.refresh());
  player.reset();
}
