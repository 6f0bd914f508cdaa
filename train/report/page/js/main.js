// Starts every section; one that fails says so and leaves the others alone.

import { notice } from "report/controls.js";
import { themeChanged } from "report/dom.js";

const sections = ["problem", "weights", "block", "phases", "pipeline", "results"];

for (const name of sections) {
  const section = document.getElementById(name);
  try {
    const { start } = await import(`report/${name}.js`);
    start(section);
  } catch (error) {
    console.error(error);
    section.append(notice("This section could not be drawn.", String(error)));
  }
}

// ------------------------------------------------------------------ theme

const THEMES = { "light dark": "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
const themeButton = document.getElementById("theme");
let scheme = "light dark";
themeButton.textContent = THEMES[scheme];
themeButton.addEventListener("click", () => {
  const names = Object.keys(THEMES);
  scheme = names[(names.indexOf(scheme) + 1) % names.length];
  document.documentElement.style.colorScheme = scheme;
  themeButton.textContent = THEMES[scheme];
  themeChanged();
});

// ------------------------------------------------------------------ which section is being read

const links = new Map(
  [...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]),
);
const observer = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(target.id)?.setAttribute("aria-current", "true");
    }
  },
  { rootMargin: "-20% 0px -75% 0px" },
);
for (const section of document.querySelectorAll("main > section")) observer.observe(section);
document.documentElement.dataset.ready = "true";
