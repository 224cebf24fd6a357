export const percent = (share) =>
  share === 0 ? "0 %" : share < 0.001 ? `${(100 * share).toPrecision(2)} %` : `${(100 * share).toFixed(1)} %`;

export const whole = (number) => Math.round(number).toLocaleString("en");

/** A number with three digits and a unit: human(1610612736, "FLOP") is "1.61 GFLOP". */
export function human(number, unit = "") {
  for (const [size, letter] of [
    [1e15, "P"],
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ])
    if (Math.abs(number) >= size) return `${Number((number / size).toPrecision(3))} ${letter}${unit}`.trim();
  return `${Number(number.toPrecision(3))} ${unit}`.trim();
}

/** A token whose spaces are seen. */
export const visible = (text) => text.replaceAll(" ", "␣");

/** Most labels are longer than one character, so that each needs room after it. */
export const areWords = (labels) => 2 * labels.filter((text) => text.length > 1).length > labels.length;

/** A list of numbers as ranges: "0-3, 8". */
export function ranges(numbers, most = 12) {
  const runs = [];
  for (const number of numbers) {
    const last = runs.at(-1);
    if (last && number === last[1] + 1) last[1] = number;
    else runs.push([number, number]);
  }
  const shown = runs.slice(0, most).map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`));
  return shown.join(", ") + (runs.length > most ? `, and ${runs.length - most} more` : "");
}
