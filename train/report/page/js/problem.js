// Section 2: how magnitudes and shares change with depth.

import { chart } from "report/chart.js";
import { runColour, sideBySide } from "report/comparing.js";
import { badge, notice, valuesTable } from "report/controls.js";
import { array, readName, sublayerName, whyMissing } from "report/data.js";
import { h, number } from "report/dom.js";
import { Heatmap } from "report/heatmap.js";

const at = (run) => `${run.name}, step ${run.diagnostics.step}`;

/** A chart of one array over depth, a line for each run that has it, and notices for the others. */
export function depthChart(body, runs, name, { label, yLabel, log = false, xName }) {
  const having = runs.filter((run) => array(run, name));
  for (const run of runs.filter((run) => !having.includes(run))) {
    body.append(notice(`${label} of ${run.name} is missing.`, whyMissing(run, name)));
  }
  if (!having.length) return;
  const lines = having.map((run) => ({
    name: run.name,
    colour: runColour(run),
    x: array(run, name).map((_, i) => i + 1),
    y: array(run, name),
    points: array(run, name).length < 40,
  }));
  const longest = Math.max(...having.map((run) => run.numSublayers));
  const nameOf = (x) => `${x}: ${xName(x - 1, longest)}`;
  const { element } = chart({
    label,
    lines,
    xLabel: "depth",
    yLabel,
    log,
    xName: nameOf,
    steps: true,
  });
  const table = valuesTable(label, () => ({
    head: ["place", ...having.map((run) => run.name)],
    rows: lines
      .reduce((a, b) => (a.x.length >= b.x.length ? a : b))
      .x.map((x, i) => [nameOf(x), ...lines.map((line) => number(line.y[i], 6))]),
  }));
  body.append(element, badge("measured", having.map(at).join("; ")), table);
}

function dilution(runs, body) {
  const grid = h("div", { class: "pair" });
  for (const run of runs) {
    const shares = array(run, "dilution");
    const panel = h("div", {}, h("h4", {}, `${run.name} (${run.residual})`));
    grid.append(panel);
    if (!shares) {
      panel.append(notice("Dilution is missing.", whyMissing(run, "dilution")));
      continue;
    }
    const outputs = ["embedding", ...shares.slice(1).map((_, i) => sublayerName(i))];
    const reads = shares.map((_, i) => readName(i, run.numSublayers));
    const heatmap = new Heatmap({
      label: `Share of each earlier output in each hidden state of ${run.name}`,
      describe: (row, column, value) =>
        `Share ${number(value, 5)}: ${outputs[column]}, in the hidden state ${reads[row].replace("final", "at the final")}.`,
    });
    panel.append(heatmap.element, badge("measured", at(run)));
    heatmap.set(
      shares,
      reads.map((name) => name.replace("before ", "")),
      outputs,
    );
    panel.append(
      valuesTable(`Dilution of ${run.name}`, () => ({
        head: ["hidden state", ...outputs],
        rows: shares.map((row, i) => [
          reads[i],
          ...row.map((v) => (v === null ? "" : number(v, 6))),
        ]),
      })),
    );
  }
  body.append(grid);
}

export function start(section) {
  sideBySide(section.querySelector("#hidden-norms"), "Run of the magnitudes", (shown, body) =>
    depthChart(body, shown, "read_norm", {
      label: "Magnitude of the hidden state",
      yLabel: "root mean square",
      log: true,
      xName: readName,
    }),
  );
  sideBySide(section.querySelector("#dilution"), "Run of the dilution", dilution);
}
