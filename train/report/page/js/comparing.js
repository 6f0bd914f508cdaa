// Runs side by side where they may be compared, and one at a time where they may not.

import { choice, notice } from "report/controls.js";
import { comparable, data, runs } from "report/data.js";
import { RUN_COLOURS, h } from "report/dom.js";

export function runColour(run) {
  return RUN_COLOURS[runs.indexOf(run) % RUN_COLOURS.length];
}

/** One sentence for each field that differs. */
export function whyNotComparable() {
  return data.differences
    .map(({ field, values }) => {
      const list = Object.entries(values).map(([name, value]) => `${value} in ${name}`);
      return `${field} is ${list.join(", ")}`;
    })
    .join("; ");
}

export function refusal() {
  return notice(
    "These runs are not shown side by side.",
    `They differ in what has to agree: ${whyNotComparable()}. Each is shown on its own.`,
  );
}

/** Calls `draw(runs, body)` with all runs, or with the chosen one where they must stay apart. */
export function sideBySide(container, label, draw) {
  const body = h("div");
  if (comparable || runs.length === 1) {
    container.append(body);
    draw(runs, body);
    return;
  }
  const tabs = runChoice(label, runs, (run) => {
    body.replaceChildren();
    draw([run], body);
  });
  container.append(refusal(), tabs.element, body);
  tabs.start();
}

/** Tabs that choose a run. */
export function runChoice(label, among, onchange) {
  const options = among.map((run) => ({ value: run, text: run.name, colour: runColour(run) }));
  return choice(label, options, onchange);
}
