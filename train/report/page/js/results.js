// Section 7: what came of it. Curves of the given runs, and the paper's scaling fits.

import { chart } from "report/chart.js";
import { refusal, runColour, sideBySide } from "report/comparing.js";
import { badge, notice, table } from "report/controls.js";
import { comparable, data, readName, runs, sublayerName, whyMissing } from "report/data.js";
import { h, integer, number } from "report/dom.js";
import { depthChart } from "report/problem.js";

function lossChart(shown, body) {
  const having = shown.filter((run) => run.curves.loss.step.length);
  for (const run of shown.filter((run) => !having.includes(run))) {
    body.append(notice(`The loss of ${run.name} is missing.`, whyMissing(run, "metrics")));
  }
  if (!having.length) return;
  const lines = having.flatMap((run) => {
    const [training, validation] = [run.curves.loss, run.curves["validation/loss"]];
    return [
      {
        name: `${run.name}, training`,
        colour: runColour(run),
        x: training.step,
        y: training.value,
        width: 1,
      },
      {
        name: `${run.name}, held-out`,
        colour: runColour(run),
        x: validation.step,
        y: validation.value,
        dash: [6, 4],
        points: true,
      },
    ].filter((line) => line.x.length);
  });
  const { element } = chart({
    label: "Loss",
    lines,
    xLabel: "step",
    yLabel: "nats per token",
    xName: (x) => `step ${x}`,
    height: 300,
  });
  body.append(
    element,
    badge(
      "measured",
      having
        .map((run) => `${run.name}, ${integer(run.tokens)} tokens, seed ${run.seed}`)
        .join("; "),
    ),
  );
}

function comparisonTable(place) {
  const last = (run, name) => run.curves[name].value.at(-1) ?? null;
  const columns = [
    ["residual", (run) => run.residual],
    ["S", (run) => run.blockSize ?? "none"],
    ["parameters", (run) => integer(run.parameters)],
    ["tokens", (run) => integer(run.tokens)],
    ["held-out loss", (run) => number(last(run, "validation/loss"), 5)],
    ["bits per byte", (run) => number(last(run, "validation/bits_per_byte"), 5)],
  ];
  if (!comparable && runs.length > 1) place.append(refusal());
  const shown = comparable ? [runs] : runs.map((run) => [run]);
  for (const group of shown) {
    const title =
      group.length > 1 ? "The given runs, on the same held-out text" : `Run ${group[0].name}`;
    const rows = group.map((run) => [
      h(
        "th",
        { scope: "row" },
        h("span", { class: "swatch", style: `background: var(${runColour(run)})` }),
        run.name,
      ),
      ...columns.map(([, value]) => value(run)),
    ]);
    place.append(table(title, ["run", ...columns.map(([name]) => name)], rows));
  }
  place.append(
    badge("measured", "one run each: differences within what another seed changes say nothing"),
  );
}

function scalingChart(place) {
  const { rows, fits } = data.paper.scaling;
  const names = {
    baseline: ["baseline", "--run-2"],
    block: ["Block", "--run-1"],
    full: ["Full", "--run-3"],
  };
  const x = rows.map((row) => row.compute);
  const grid = Array.from({ length: 41 }, (_, i) => 0.6 * 10 ** (i / 40));
  const lines = Object.entries(names).flatMap(([kind, [name, colour]]) => [
    { name, colour, x, y: rows.map((row) => row[kind]), points: "only" },
    {
      name: `${name}, fit`,
      colour,
      x: grid,
      y: grid.map((c) => fits[kind].A_figure * c ** -fits[kind].a_figure),
      width: 1,
      dash: [4, 4],
    },
  ]);
  const { element } = chart({
    label: "Loss against compute",
    lines,
    xLabel: "PFLOP/s-days",
    yLabel: "loss",
    logX: true,
    xName: (c) => `${number(c)} PFLOP/s-days`,
  });
  place.append(element, badge("quoted", data.paper.scaling.source));
}

export function start(section) {
  sideBySide(section.querySelector("#losses"), "Run of the loss", lossChart);
  comparisonTable(section.querySelector("#comparison"));
  const over = (id, name, options) =>
    sideBySide(section.querySelector(id), `Run: ${options.label}`, (shown, body) =>
      depthChart(body, shown, name, options),
    );
  over("#magnitudes", "sublayer_norm", {
    label: "Magnitude of each sub-layer's output",
    yLabel: "root mean square",
    log: true,
    xName: sublayerName,
  });
  over("#gradients", "gradient_norm_sublayer", {
    label: "Gradient at each sub-layer's output",
    yLabel: "norm",
    log: true,
    xName: sublayerName,
  });
  over("#lens", "logit_lens_loss", {
    label: "Loss of the head after each read",
    yLabel: "nats per token",
    xName: readName,
  });
  scalingChart(section.querySelector("#scaling"));
}
