// Section 5: a block of a run in two phases, with the logits that the model really had.

import { chart } from "report/chart.js";
import { runChoice } from "report/comparing.js";
import { badge, notice, selectField, table } from "report/controls.js";
import { readName, runs, unpack, unpackRows, whyMissing } from "report/data.js";
import { bytes, h, number, plural } from "report/dom.js";
import {
  gate,
  mergeWeights,
  phase1,
  rowsOfBlock,
  rowsOfPhase1,
  rowsOfSeal,
  rowsOfSublayer,
} from "report/maths.js";
import { Player } from "report/player.js";
import { spoken, tokenPicker } from "report/tokens.js";

const NAMES = {
  "two phases": "two phases",
  "one read each": "one read for each sub-layer",
  standard: "standard residual",
};
const SCHEMES = Object.keys(NAMES);

/** What a block's reads do to one token: the model's logits, and all that follows from them. */
export function computeBlock(text, token, blockSize, block) {
  const logits = unpackRows(text.logits[token], text.reads);
  const weights = unpackRows(text.weights[token], text.reads);
  const [lse, gates] = [unpack(text.lse[token]), unpack(text.gate[token])];
  const first = block * blockSize;
  const last = Math.min(first + blockSize, text.reads.length - 1);
  const finished = block + 1;
  const reads = [];
  for (let read = first; read < last; read += 1) {
    const one = phase1(logits[read].slice(0, finished));
    const g = read === first ? null : gate(logits[read][finished], one.lse);
    const merged = g === null ? one.weights : mergeWeights(one.weights, g);
    reads.push({
      read,
      logits: logits[read].slice(0, finished),
      partialLogit: g === null ? null : logits[read][finished],
      ...one,
      gate: g,
      merged,
      model: { weights: weights[read], lse: lse[read], gate: gates[read] },
      difference: Math.max(...merged.map((value, i) => Math.abs(value - weights[read][i]))),
    });
  }
  return { finished, reads };
}

/** Weights as one bar: a piece for each source. */
function bar(weights, names, isOpen) {
  const pieces = weights.map((weight, i) => {
    const open = isOpen && i === weights.length - 1;
    const kind =
      i === 0 ? "source-embedding" : open ? "source-open" : i % 2 ? "source-even" : "source-odd";
    return h("span", {
      class: `piece ${kind}`,
      style: `flex-grow: ${weight}`,
      title: `${names[i]}: ${number(weight)}`,
    });
  });
  const label = weights.map((weight, i) => `${names[i]} ${number(weight)}`).join(", ");
  return h("span", { class: "mix", role: "img", "aria-label": label }, ...pieces);
}

class PhasesFigure {
  constructor(run) {
    this.run = run;
    this.text = run.text;
    this.size = run.blockSize;
    this.blocks = Math.ceil(run.numSublayers / this.size);
    this.block = Math.floor(this.blocks / 2);
  }

  mount(figure) {
    const blocks = Array.from({ length: this.blocks }, (_, n) => ({
      value: n,
      text: `block ${n + 1}`,
    }));
    const field = selectField("Block", blocks, (value) => {
      this.block = Number(value);
      this.compute();
      this.player.reset();
    });
    field.select.value = String(this.block);
    this.table = h("div", { class: "phases" });
    this.said = h("div", { class: "readout", "aria-live": "polite" });
    this.counter = h("div", { class: "meters" });
    this.badge = h("div");
    this.player = new Player(figure, {
      label: "two phases",
      // Before, phase 1, a merge for every read but the first, and the seal.
      count: () => this.result.reads.length + 2,
      describe: (step) => this.describe(step),
      draw: (step) => this.draw(step),
    });
    const picker = tokenPicker("Token of the two phases", this.text.tokens, (token) => {
      this.token = token;
      this.compute();
      this.player.refresh();
    });
    this.compute(Math.floor(this.text.tokens.length / 2));
    figure.append(
      h("div", { class: "row" }, field.element),
      h("p", { class: "hint" }, `${this.text.origin}. Choose a token:`),
      picker.element,
      this.table,
      this.said,
      this.player.controls,
      this.badge,
      h("h3", {}, "Rows of width D that memory moves for one token in this block"),
      this.counter,
      badge(
        "computed",
        `from the block's size and the number of finished sources; ${this.run.dtype}, D = ${this.run.width}`,
      ),
      h("h3", {}, `The same for other depths, with S = ${this.size}`),
      this.overDepth(),
      badge("computed", "from the same counts"),
    );
    picker.start();
  }

  /** Rows per sub-layer against how many sources are finished. */
  overDepth() {
    const finished = Array.from({ length: 24 }, (_, i) => i + 1);
    const lines = SCHEMES.map((scheme, i) => ({
      name: NAMES[scheme],
      colour: ["--run-1", "--run-2", "--muted"][i],
      x: finished,
      y: finished.map((n) => rowsOfBlock(scheme, this.size, n) / this.size),
    }));
    const { element } = chart({
      label: "Rows for each sub-layer",
      lines,
      xLabel: "finished sources",
      yLabel: "rows of D",
      xName: (n) => plural(n, "finished source"),
      steps: true,
      height: 220,
    });
    return element;
  }

  compute(token = this.token) {
    this.token = token;
    this.result = computeBlock(this.text, token, this.size, this.block);
    const names = this.text.reads[this.result.reads.at(-1).read].sources;
    this.names = names.slice(0, this.result.finished);
  }

  describe(step) {
    const { reads, finished } = this.result;
    if (step === 0) {
      return `Before block ${this.block + 1}: ${plural(finished, "finished source")} (${this.names.join(", ")}) and ${plural(reads.length, "pseudo-query").replace("querys", "queries")}, which do not depend on the text.`;
    }
    if (step === 1) {
      return `Phase 1: the finished sources are read once for all ${plural(reads.length, "read")}. Each gets a mix o of them and the log-sum-exp of its logits. The block's first read has no partial sum: h = o.`;
    }
    if (step === reads.length + 1) {
      const worst = Math.max(...reads.map((read) => read.difference));
      return `The block is sealed. All depth weights computed here agree with those of the model to ${number(worst, 2)}.`;
    }
    const { read, partialLogit, lse, gate: g } = reads[step - 1];
    return `Phase 2 ${readName(read, this.run.numSublayers)}: g = σ(${number(partialLogit)} − ${number(lse)}) = ${number(g)}; h = ${number(1 - g)} o + ${number(g)} p, p the partial sum of ${plural(step - 1, "output")}.`;
  }

  draw(step) {
    const { reads, finished } = this.result;
    const head = ["read", ...this.names, "log-sum-exp", "mix o", "logit of p", "gate g", "h"];
    const rows = reads.map((one, i) => {
      const phase1Done = step >= 1;
      const merged = step >= i + 1;
      const cell = (shown, content) =>
        h("td", { class: shown ? "shown" : "waiting" }, shown ? content : "");
      const all = [...this.names, `partial sum of block ${this.block + 1}`];
      return {
        class: step === i + 1 ? "row-now" : null,
        cells: [
          readName(one.read, this.run.numSublayers),
          ...one.logits.map((logit) => cell(phase1Done, number(logit))),
          cell(phase1Done, number(one.lse)),
          cell(phase1Done, bar(one.weights, this.names, false)),
          one.gate === null
            ? h("td", { class: "none" }, "none")
            : cell(merged, number(one.partialLogit)),
          one.gate === null ? h("td", { class: "none" }, "none") : cell(merged, number(one.gate)),
          cell(merged, bar(one.merged, all, one.gate !== null)),
        ],
      };
    });
    const title = `Logits and log-sum-exp of token ${this.token + 1}, ${spoken(this.text.tokens[this.token])}`;
    this.table.replaceChildren(table(title, head, rows));
    this.said.textContent = this.describe(step);
    this.drawCounter(step, reads.length, finished);
    this.badge.replaceChildren(
      badge(
        "measured",
        `logits of ${this.run.name}, newest checkpoint. Log-sum-exp, gate and mixes are computed here from them and compared with the model's at the end`,
      ),
    );
  }

  drawCounter(step, reads, finished) {
    const most = Math.max(...SCHEMES.map((scheme) => rowsOfBlock(scheme, reads, finished)));
    const perRow = this.run.width * (this.run.dtype === "float32" ? 4 : 2);
    const meters = SCHEMES.map((scheme) => {
      let rows = step >= 1 ? rowsOfPhase1(scheme, reads, finished) : 0;
      for (let i = 0; i < Math.min(step, reads); i += 1)
        rows += rowsOfSublayer(scheme, i, finished);
      if (step > reads) rows += rowsOfSeal(scheme, reads);
      const total = rowsOfBlock(scheme, reads, finished);
      return h(
        "div",
        { class: "meter" },
        h("span", { class: "meter-name" }, NAMES[scheme]),
        h(
          "span",
          { class: "meter-track", "aria-hidden": "true" },
          h("span", { class: "meter-total", style: `width: ${(100 * total) / most}%` }),
          h("span", { class: "meter-now", style: `width: ${(100 * rows) / most}%` }),
        ),
        h("span", { class: "meter-value" }, `${rows} of ${total} rows, ${bytes(total * perRow)}`),
      );
    });
    this.counter.replaceChildren(...meters);
  }
}

export function start(section) {
  const place = section.querySelector("#phases-body");
  const block = runs.filter((run) => run.residual === "block");
  const having = block.filter((run) => run.text?.logits);
  for (const run of block.filter((run) => !having.includes(run))) {
    place.append(
      notice(
        `Logits of ${run.name} are missing.`,
        whyMissing(run, run.problems.text ? "text" : "logits_per_token"),
      ),
    );
  }
  if (!block.length) {
    place.append(
      notice(
        "No block to show.",
        "None of the given runs has residual=block; with Full every read stands alone and there is no partial sum to merge.",
      ),
    );
  }
  if (!having.length) return;
  const figure = h("div", { class: "figure", id: "phases-figure" });
  const tabs = runChoice("Run of the two phases", having, (run) => {
    figure.replaceChildren();
    new PhasesFigure(run).mount(figure);
  });
  if (having.length > 1) place.append(tabs.element);
  place.append(figure);
  tabs.start();
}
