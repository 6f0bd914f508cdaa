// A text whose tokens can be chosen, by pointer or with the arrow keys.

import { h, uniqueId } from "report/dom.js";

const VISIBLE = { "\n": "↵\n", "\t": "⇥", " ": " ", "⏹": "[end]" };

/** A list of tokens, of which `onchange` gets the chosen index. */
export function tokenPicker(label, tokens, onchange, selected = Math.floor(tokens.length / 2)) {
  const prefix = uniqueId("token");
  const spans = tokens.map((token, i) =>
    h(
      "span",
      {
        id: `${prefix}-${i}`,
        role: "option",
        class: "token",
        "aria-label": `${i + 1}: ${spoken(token)}`,
      },
      VISIBLE[token] ?? token.replaceAll("\n", "↵\n"),
    ),
  );
  const element = h(
    "div",
    { class: "tokens", role: "listbox", tabindex: 0, "aria-label": label },
    ...spans,
  );
  let now = -1;

  function select(index) {
    const to = Math.max(0, Math.min(index, tokens.length - 1));
    if (to === now) return;
    spans[now]?.setAttribute("aria-selected", "false");
    now = to;
    spans[now].setAttribute("aria-selected", "true");
    element.setAttribute("aria-activedescendant", spans[now].id);
    const { offsetTop, offsetHeight } = spans[now];
    if (offsetTop < element.scrollTop) element.scrollTop = offsetTop - 4;
    const bottom = offsetTop + offsetHeight - element.clientHeight;
    if (bottom > element.scrollTop) element.scrollTop = bottom + 4;
    onchange(now);
  }
  for (const span of spans) span.setAttribute("aria-selected", "false");
  element.addEventListener("click", (event) => {
    const index = spans.indexOf(event.target.closest(".token"));
    if (index >= 0) select(index);
  });
  element.addEventListener("keydown", (event) => {
    const moves = {
      ...{ ArrowRight: now + 1, ArrowLeft: now - 1, ArrowDown: now + 10, ArrowUp: now - 10 },
      ...{ Home: 0, End: tokens.length - 1 },
    };
    if (moves[event.key] === undefined) return;
    event.preventDefault();
    select(moves[event.key]);
  });
  return { element, start: () => select(selected), select };
}

/** A token in quotes, white space by name. */
export function spoken(token) {
  return (
    { "\n": "new line", " ": "space", "\t": "tab", "⏹": "end of document" }[token] ?? `“${token}”`
  );
}
