// One read as a diagram: the sub-layers so far, the sources, and what they flow into.

import { sublayerName } from "report/data.js";
import { number, plural, s } from "report/dom.js";

const NARROW = 560;

/** Where everything goes in a drawing of `width`. */
function layOut(width, { numSublayers, most }) {
  const narrow = width < NARROW;
  const inner = width - 8;
  const wanted = Math.max(12, Math.min(52, inner / numSublayers));
  const perLine = Math.max(1, Math.min(numSublayers, Math.floor(inner / wanted)));
  const tile = Math.min(60, inner / perLine);
  const tileHeight = Math.min(22, Math.max(10, tile - 3));
  const sourcesTop = 62 + Math.ceil(numSublayers / perLine) * (tileHeight + 4);
  const bar = Math.max(2.5, Math.min(30, 320 / most));
  const room = Math.max(most * bar, 96);
  return {
    ...{ width, narrow, perLine, tile, tileHeight, sourcesTop, bar },
    trackTop: 28,
    sourceWidth: narrow ? width * 0.42 : Math.min(250, width * 0.34),
    readX: narrow ? width * 0.62 : width * 0.56,
    readY: sourcesTop + room / 2,
    height: sourcesTop + room + 16,
  };
}

/** Every sub-layer as a tile: in a sealed block, in the open one, the one that reads, to come. */
function drawTrack({ read, numSublayers, size, finished }, place) {
  const { perLine, tile, tileHeight, trackTop } = place;
  const named = tile >= 30;
  const title = `${plural(numSublayers, "sub-layer")}${named ? ": A attention, M MLP" : ""}`;
  const parts = [s("text", { x: 4, y: 16, class: "svg-label" }, title)];
  for (let i = 0; i < numSublayers; i += 1) {
    const block = Math.floor(i / size);
    const x = 4 + (i % perLine) * tile;
    const y = trackTop + Math.floor(i / perLine) * (tileHeight + 4);
    const gap = i % size === 0 ? 2 : 0.5; // Wider between blocks.
    const kinds = ["tile", block % 2 ? "tile-odd" : "tile-even"];
    if (i < read) kinds.push(block < finished - 1 ? "tile-sealed" : "tile-open");
    if (i === read) kinds.push("tile-now");
    const box = { x: x + gap, y, width: tile - gap - 1, height: tileHeight, rx: 3 };
    const hover = s("title", {}, `${sublayerName(i)}, block ${block + 1}`);
    parts.push(s("rect", { ...box, class: kinds.join(" ") }, hover));
    if (named) {
      const style = i < read ? "svg-tile svg-tile-done" : "svg-tile";
      const text = `${"AM"[i % 2]}${Math.floor(i / 2) + 1}`;
      parts.push(s("text", { x: x + tile / 2, y: y + tileHeight / 2 + 4, class: style }, text));
    }
  }
  return parts;
}

/** Every source as a bar, with a link as wide as its weight; the open one fills as it grows. */
function drawSources({ names, open, size, weights }, place) {
  const { narrow, sourcesTop, bar, sourceWidth, readX, readY } = place;
  const parts = [s("text", { x: 4, y: sourcesTop - 10, class: "svg-label" }, "sources")];
  const height = Math.max(1.5, bar - (bar > 8 ? 4 : 1));
  const bend = (readX - sourceWidth) / 2;
  names.forEach((name, i) => {
    const isOpen = open > 0 && i === names.length - 1;
    const kind = isOpen ? "open" : i === 0 ? "embedding" : i % 2 ? "even" : "odd";
    const weight = weights ? weights[i] : 1 / names.length;
    const y = sourcesTop + i * bar;
    const middle = y + height / 2;
    const from = `${sourceWidth + 4} ${middle} C ${sourceWidth + bend} ${middle}`;
    parts.push(
      s("path", {
        d: `M ${from}, ${readX - bend} ${readY}, ${readX - 16} ${readY}`,
        class: isOpen ? "link link-open" : "link",
        "stroke-width": Math.max(0.6, weight * 16),
      }),
    );
    const box = { x: 4, y, width: sourceWidth, height, rx: Math.min(4, height / 2) };
    parts.push(s("rect", { ...box, class: isOpen ? "source-frame" : `source-${kind}` }));
    if (isOpen) {
      const line = Math.min(bar > 24 ? 6 : 3, height);
      const grown = { y: y + height - line, height: line, width: (sourceWidth * open) / size };
      parts.push(s("rect", { ...box, ...grown, rx: line / 2, class: "source-open" }));
    }
    if (bar < 15) return;
    const text = isOpen ? `partial${narrow ? "" : " sum"}, ${open} of ${size}` : name;
    const style = `svg-source source-${kind}-text`;
    parts.push(s("text", { x: 12, y: middle + 4, class: style }, text));
    if (weights && !narrow) {
      const at = { x: sourceWidth - 4, y: middle + 4, class: `${style} svg-weight` };
      parts.push(s("text", at, number(weight, 3)));
    }
  });
  return parts;
}

/** The softmax, the sub-layer behind it, and what becomes of its output. */
function drawReader({ read, numSublayers, size, open, isFull }, place) {
  const { width, narrow, readX, readY } = place;
  const isFinal = read === numSublayers;
  const box = { x: readX + 38, y: readY - 20, width: width - readX - 42, height: 40, rx: 6 };
  const middle = { x: box.x + box.width / 2, y: readY + 5 };
  const target = isFinal ? "norm, head" : sublayerName(read);
  const arrow = { class: "arrow", "marker-end": "url(#arrow)" };
  const parts = [
    s("circle", { cx: readX, cy: readY, r: 15, class: "read" }),
    s("text", { x: readX, y: readY + 5, class: "svg-read" }, "α"),
    s("path", { d: `M ${readX + 16} ${readY} H ${readX + 30}`, ...arrow }),
    s("rect", { ...box, class: "sublayer" }),
    s("text", { ...middle, class: "svg-sublayer" }, target),
  ];
  if (isFinal || narrow) return parts; // The line below says it too.
  const partial = open ? "added to the partial sum" : "opens the partial sum";
  const note = { x: width - 4, y: readY + 42, class: "svg-note" };
  parts.push(s("text", note, isFull ? `becomes output ${read + 1}` : partial));
  if (!isFull && ((read + 1) % size === 0 || read + 1 === numSublayers)) {
    const seal = { x: width - 4, y: readY + 60, class: "svg-note svg-seal" };
    parts.push(s("text", seal, `seals block ${Math.floor(read / size) + 1}`));
  }
  return parts;
}

function arrowHead() {
  const box = { viewBox: "0 0 8 8", refX: 4, refY: 4, markerWidth: 6, markerHeight: 6 };
  const head = s("path", { d: "M 0 0 L 8 4 L 0 8 z", class: "arrow-head" });
  return s("defs", {}, s("marker", { id: "arrow", orient: "auto", ...box }, head));
}

/**
 * Draws one read.
 *
 * `view`: the read's `names` of sources, how many are `finished` and how many outputs the `open`
 * partial sum has; `read`, `numSublayers` and block `size`; `most` sources of any read; `isFull`;
 * `weights` of the sources, or null; and the `label` for screen readers.
 */
export function drawRead(svg, view) {
  const width = svg.parentElement.clientWidth;
  if (!width) return;
  const place = layOut(width, view);
  svg.setAttribute("viewBox", `0 0 ${width} ${place.height}`);
  svg.setAttribute("width", width);
  svg.setAttribute("height", place.height);
  svg.setAttribute("aria-label", view.label);
  svg.replaceChildren(
    arrowHead(),
    ...drawTrack(view, place),
    ...drawSources(view, place),
    ...drawReader(view, place),
  );
}
