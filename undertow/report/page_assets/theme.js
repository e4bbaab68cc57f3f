// Light, dark, or as the system is; and the style sheet's colours for the canvases.

const THEMES = ["auto", "light", "dark"];
const THEME_NAMES = { auto: "as the system", light: "light", dark: "dark" };
const THEME_SIGNS = { auto: "◐", light: "○", dark: "●" };

function startTheme(onChange) {
  const button = document.getElementById("theme");
  let theme = "auto";
  try {
    theme = localStorage.getItem("undertow-theme") ?? "auto";
  } catch {
    // A page opened from disk may have no storage; the choice then lasts as long as the page.
  }
  const apply = (chosen) => {
    theme = THEMES.includes(chosen) ? chosen : "auto";
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = THEME_SIGNS[theme];
    button.title = `Colours: ${THEME_NAMES[theme]}`;
    button.setAttribute("aria-label", button.title);
    onChange();
  };
  button.addEventListener("click", () => {
    apply(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
    try {
      localStorage.setItem("undertow-theme", theme);
    } catch {
      // As above.
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
  // Paper is light.
  let beforePrint = theme;
  addEventListener("beforeprint", () => {
    beforePrint = theme;
    apply("light");
  });
  addEventListener("afterprint", () => apply(beforePrint));
  apply(theme);
}

/** Colours as the style sheet has them now: `fill[i]`, and `dim[i]` for what does not match. */
function readPalette(colours) {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const names = [
    "paper",
    "panel",
    "ink",
    "soft",
    "rule",
    "grid",
    "accent",
    "exposed",
    "exposed-paper",
    "bound",
    "band-a",
    "band-b",
    "memory",
    "memory-paper",
  ];
  const palette = Object.fromEntries(names.map((name) => [name, read(name)]));
  palette.fill = colours.map((colour) => read(colour.name));
  palette.dim = palette.fill.map((colour) => mix(colour, palette.paper, 0.8));
  // From afar, and where there is no room for hatching: its average.
  palette.exposedFar = mix(palette.exposed, palette["exposed-paper"], 0.42);
  palette.dimExposed = mix(palette.exposed, palette.paper, 0.8);
  // Whichever of the two contrasts more.
  palette.inkOn = palette.fill.map((colour) => (lightness(colour) > 0.21 ? "#14202e" : "#ffffff"));
  palette.hatch = hatch(palette);
  palette.font = style.fontFamily || "sans-serif";
  return palette;
}

function channels(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

/** `share` of `other` in `colour`. */
function mix(colour, other, share) {
  const [a, b] = [channels(colour), channels(other)];
  return `rgb(${a.map((value, i) => Math.round(value * (1 - share) + b[i] * share)).join(" ")})`;
}

/** Relative luminance, as in WCAG. */
function lightness(colour) {
  const [r, g, b] = channels(colour).map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** The pattern of exposed time. */
function hatch(palette) {
  const size = 8 * devicePixelRatio;
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(size);
  const context = tile.getContext("2d");
  context.fillStyle = palette["exposed-paper"];
  context.fillRect(0, 0, size, size);
  context.strokeStyle = palette.exposed;
  context.lineWidth = size * 0.26;
  context.beginPath();
  for (const shift of [-1, 0, 1]) {
    context.moveTo((shift - 0.5) * size, size * 1.5);
    context.lineTo((shift + 1.5) * size, -size * 0.5);
  }
  context.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / devicePixelRatio));
  return pattern;
}
