// Colours of canvases, which read them from the style sheet: they follow light and dark.

const query = matchMedia("(prefers-color-scheme: dark)");
let dark = $state(query.matches);
query.addEventListener("change", (event) => (dark = event.matches));

const cache = new Map();

/** Returns a colour of page.css, such as "--ink", as [red, green, blue]. It changes with light and dark. */
export function colour(name) {
  const key = `${name} ${dark}`;
  if (!cache.has(key)) {
    const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const digits = text.length === 4 ? [...text.slice(1)].map((digit) => digit + digit).join("") : text.slice(1); // #abc
    cache.set(key, [0, 2, 4].map((at) => parseInt(digits.slice(at, at + 2), 16)));
  }
  return cache.get(key);
}

export const rgb = (name, alpha = 1) => `rgba(${colour(name).join(",")},${alpha})`;

/** Gives a canvas a size. The same size again would cost a new buffer. */
export function resize(canvas, width, height) {
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
}
