// Play, pause, step, reset and speed for anything that is drawn in steps.

import { h, uniqueId } from "report/dom.js";

const SPEEDS = [0.5, 1, 2, 4];
const SECONDS_PER_STEP = 1.2;
const players = [];

/**
 * Controls that walk through `count()` steps, drawing each with `draw(step)`.
 * `figure` is what the keys Space, Right and R act on while it is in view.
 */
export class Player {
  constructor(figure, { label, count, draw, describe }) {
    this.figure = figure;
    this.count = count;
    this.draw = draw;
    this.describe = describe;
    this.step = 0;
    this.timer = null;
    this.speed = 1;

    const button = (text, name, onclick) =>
      h("button", { type: "button", class: "player-button", "aria-label": name, onclick }, text);
    this.playButton = button("Play", `Play: ${label}`, () => this.toggle());
    const speedId = uniqueId("speed");
    this.speedSelect = h("select", {
      id: speedId,
      onchange: (event) => this.setSpeed(Number(event.target.value)),
    });
    for (const speed of SPEEDS) {
      this.speedSelect.append(h("option", { value: speed, selected: speed === 1 }, `${speed}×`));
    }
    const seekId = uniqueId("seek");
    this.seek = h("input", {
      id: seekId,
      type: "range",
      min: 0,
      value: 0,
      oninput: () => {
        this.pause();
        this.go(Number(this.seek.value));
      },
    });
    this.position = h("span", { class: "player-position", "aria-hidden": "true" });
    this.controls = h(
      "div",
      { class: "player", role: "group", "aria-label": `Controls: ${label}` },
      this.playButton,
      button("Step", `Next step: ${label}`, () => this.next()),
      button("Reset", `Reset: ${label}`, () => this.reset()),
      h("label", { for: seekId, class: "visually-hidden" }, `Step of ${label}`),
      this.seek,
      this.position,
      h("span", { class: "player-speed" }, h("label", { for: speedId }, "Speed"), this.speedSelect),
      h(
        "span",
        { class: "player-keys", "aria-hidden": "true" },
        ...["Space", "play", "→", "step", "R", "reset"].map((text, i) =>
          h(i % 2 ? "span" : "kbd", {}, text),
        ),
      ),
    );
    // A figure that is built again has one player, the last.
    players.splice(0, players.length, ...players.filter((other) => other.figure !== figure), this);
  }

  get playing() {
    return this.timer !== null;
  }

  go(step) {
    this.step = Math.max(0, Math.min(step, this.count() - 1));
    this.seek.max = this.count() - 1;
    this.seek.value = this.step;
    this.seek.setAttribute("aria-valuetext", this.describe(this.step));
    this.position.textContent = `${this.step + 1} / ${this.count()}`;
    this.draw(this.step);
  }

  /** Draws again, after what is drawn has changed. */
  refresh() {
    this.go(this.step);
  }

  next() {
    this.pause();
    this.go(this.step + 1);
  }

  reset() {
    this.pause();
    this.go(0);
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  play() {
    if (this.step === this.count() - 1) this.go(0);
    this.timer = setTimeout(() => this.tick(), (1000 * SECONDS_PER_STEP) / this.speed);
    this.showState();
  }

  tick() {
    this.go(this.step + 1);
    if (this.step === this.count() - 1) this.pause();
    else this.timer = setTimeout(() => this.tick(), (1000 * SECONDS_PER_STEP) / this.speed);
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.showState();
  }

  showState() {
    this.playButton.textContent = this.playing ? "Pause" : "Play";
    const name = this.playButton.getAttribute("aria-label").replace(/^\w+/, "");
    this.playButton.setAttribute("aria-label", `${this.playButton.textContent}${name}`);
    this.figure.classList.toggle("playing", this.playing);
  }

  setSpeed(speed) {
    this.speed = speed;
    this.speedSelect.value = String(speed);
  }
}

/** The player that keys act on: the one that has the focus, or else the one most in view. */
function playerInView(focused) {
  const within = players.find((player) => player.figure.contains(focused));
  if (within) return within;
  let best = null;
  let most = 0.5;
  for (const player of players) {
    const { top, bottom, height } = player.figure.getBoundingClientRect();
    const seen = Math.min(bottom, innerHeight) - Math.max(top, 0);
    const share = seen / Math.min(height, innerHeight);
    if (height > 0 && share > most) [best, most] = [player, share];
  }
  return best;
}

addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  const target = event.target;
  // Controls keep the keys that they use themselves.
  if (target.closest?.("input, select, textarea, [role=application], [role=listbox]")) return;
  if (event.key === " " && target.closest?.("button, summary, a")) return;
  if (event.key === "ArrowRight" && target.closest?.("[role=tablist]")) return;
  const actions = { " ": "toggle", ArrowRight: "next", r: "reset", R: "reset" };
  const action = actions[event.key];
  const player = action && playerInView(target);
  if (!player) return;
  event.preventDefault();
  player[action]();
});
