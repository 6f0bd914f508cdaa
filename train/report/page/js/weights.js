// Section 3: the depth weights of every read, averaged or of one token.

import { chart } from "report/chart.js";
import { runChoice, runColour } from "report/comparing.js";
import { badge, choice, notice, valuesTable } from "report/controls.js";
import { array, readName, runs, unpackRows, whyMissing } from "report/data.js";
import { h, number } from "report/dom.js";
import { Heatmap } from "report/heatmap.js";
import { spoken, tokenPicker } from "report/tokens.js";

const KINDS = [
  { value: "", text: "all reads" },
  { value: "pre-attention", text: "pre-attention" },
  { value: "pre-MLP", text: "pre-MLP" },
  { value: "final", text: "final" },
];

/** Rows of equal length: null where a read has no such source. */
function padded(rows) {
  const length = Math.max(...rows.map((row) => row.length));
  return rows.map((row) => [...row, ...Array(length - row.length).fill(null)]);
}

class WeightsFigure {
  constructor(run) {
    this.run = run;
    this.kind = "";
    this.token = null; // null: the mean.
    const { diagnostics, text } = run;
    const mean = array(run, "depth_weights");
    this.reads = (mean ? diagnostics : text).reads;
    this.mean = mean ?? text.meanWeights;
    this.meanOf = mean
      ? `mean over the tokens of ${run.name}, step ${diagnostics.step}`
      : `mean over the text below, newest checkpoint of ${run.name}`;
    this.columns = this.reads.reduce((a, b) =>
      b.sources.length >= a.sources.length ? b : a,
    ).sources;
    this.heatmap = new Heatmap({
      isOpen: (row, column) => this.isPartialSum(this.shown[row], column),
      label: `Depth weights of ${run.name}`,
      describe: (row, column, value) => {
        const read = this.shown[row];
        const at = read === this.reads.length - 1 ? "final read" : `read ${this.nameOf(read)}`;
        return `Weight ${number(value, 5)}: ${this.reads[read].sources[column]}, in the ${at}.`;
      },
    });
    this.badge = h("div");
  }

  nameOf(read) {
    return readName(read, this.reads.length - 1);
  }

  isPartialSum(read, source) {
    return this.reads[read].sources[source].startsWith("partial sum");
  }

  weights() {
    if (this.token === null) return this.mean;
    return unpackRows(this.run.text.weights[this.token], this.reads);
  }

  draw() {
    this.shown = this.reads
      .map((_, i) => i)
      .filter((i) => !this.kind || this.reads[i].kind === this.kind);
    const rows = this.weights();
    this.heatmap.set(
      padded(this.shown.map((read) => rows[read])),
      this.shown.map((read) => this.nameOf(read).replace("before ", "")),
      this.columns,
    );
    const of =
      this.token === null
        ? this.meanOf
        : `token ${this.token + 1}, ${spoken(this.run.text.tokens[this.token])}, newest checkpoint of ${this.run.name}`;
    this.badge.replaceChildren(badge("measured", of));
  }

  mount(body) {
    const text = this.run.text?.weights ? this.run.text : null;
    const kinds = choice("Which reads", KINDS, (kind) => {
      this.kind = kind;
      this.draw();
    });
    const controls = h("div", { class: "row" }, kinds.element);
    body.append(controls);
    if (text) {
      const box = h("div", {}, h("p", { class: "hint" }, `${text.origin}. Choose a token:`));
      const picker = tokenPicker("Token whose weights are shown", text.tokens, (token) => {
        this.token = token;
        this.draw();
      });
      box.append(picker.element);
      const views = choice(
        "Mean or one token",
        [
          { value: "mean", text: "mean" },
          { value: "token", text: "one token" },
        ],
        (view) => {
          box.hidden = view === "mean";
          if (view === "token" && !this.started) {
            this.started = true;
            picker.start();
          } else if (view === "token") {
            this.token = this.lastToken;
            this.draw();
          } else {
            this.lastToken = this.token;
            this.token = null;
            this.draw();
          }
        },
      );
      controls.append(views.element);
      body.append(box);
      kinds.start();
      views.start();
    } else {
      body.append(notice("Single tokens are missing.", whyMissing(this.run, "text")));
      kinds.start();
    }
    body.append(this.heatmap.element, this.badge);
    if (this.run.residual === "block") {
      const note = "A dot: the block was still open, and this its partial sum.";
      this.heatmap.legend.after(h("p", { class: "hint" }, note));
    }
    body.append(
      valuesTable(`Depth weights of ${this.run.name}`, () => ({
        head: ["read", ...this.columns],
        rows: this.shown.map((read) => [
          this.nameOf(read),
          ...this.weights()[read].map((value) => (value === null ? "" : number(value, 6))),
        ]),
      })),
    );
  }
}

function entropyChart(body, run) {
  const entropy = array(run, "entropy");
  if (!entropy) {
    body.append(notice("The entropy is missing.", whyMissing(run, "entropy")));
    return;
  }
  const { element } = chart({
    steps: true,
    label: "Normalised entropy of each read",
    lines: [
      {
        name: run.name,
        colour: runColour(run),
        x: entropy.map((_, i) => i + 1),
        y: entropy,
        points: entropy.length < 40,
      },
    ],
    xLabel: "depth",
    yLabel: "entropy / log n",
    xName: (x) => readName(x - 1, run.numSublayers),
    height: 280,
  });
  body.append(
    h("h3", {}, "How spread out a read is"),
    h("p", { class: "hint" }, "1: all its sources weigh the same; 0: one takes all."),
    element,
    badge("measured", `${run.name}, step ${run.diagnostics.step}`),
  );
}

export function start(section) {
  const place = section.querySelector("#weights-figure");
  const having = runs.filter(
    (run) => run.residual !== "standard" && (array(run, "depth_weights") || run.text?.weights),
  );
  for (const run of runs) {
    if (run.residual !== "standard" && !having.includes(run)) {
      place.append(
        notice(`Depth weights of ${run.name} are missing.`, whyMissing(run, "depth_weights")),
      );
    }
  }
  if (!runs.some((run) => run.residual !== "standard")) {
    place.append(
      notice(
        "No depth weights.",
        "None of the given runs has residual=block or full: a standard residual has no reads.",
      ),
    );
  }
  if (!having.length) return;
  // Full first: it is the general form.
  having.sort((a, b) => (b.residual === "full") - (a.residual === "full"));
  const body = h("div");
  const tabs = runChoice("Run of the depth weights", having, (run) => {
    body.replaceChildren();
    const figure = new WeightsFigure(run);
    const matrix = h("div");
    const entropy = h("div", { class: "entropy" });
    // A narrow matrix leaves room beside it.
    body.append(h("div", { class: figure.columns.length <= 8 ? "pair" : "" }, matrix, entropy));
    figure.mount(matrix);
    entropyChart(entropy, run);
  });
  if (having.length > 1) place.append(tabs.element);
  place.append(body);
  tabs.start();
}
