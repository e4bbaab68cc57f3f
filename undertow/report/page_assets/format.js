// Quantities for readers, as undertow/units.py writes them, and the ticks of an axis.

function figures(value) {
  return value >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(4)));
}

function formatNs(ns) {
  const sign = ns < 0 ? "-" : "";
  const value = Math.abs(ns);
  for (const [unit, scale] of [
    ["s", 1e9],
    ["ms", 1e6],
    ["us", 1e3],
  ]) {
    if (value >= scale) return `${sign}${figures(value / scale)} ${unit}`;
  }
  return `${sign}${Math.round(value)} ns`;
}

/** A point in time: always in ms, as on the axis, and to the microsecond. */
function formatAt(ns) {
  return `${(ns / 1e6).toFixed(3)} ms`;
}

function formatBytes(nbytes) {
  let size = Math.abs(nbytes);
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${nbytes < 0 ? "-" : ""}${figures(size)} ${units[unit]}`;
}

/** A number with a decimal prefix: 68.7 G. */
function formatRate(value) {
  for (const [prefix, scale] of [
    ["P", 1e15],
    ["T", 1e12],
    ["G", 1e9],
    ["M", 1e6],
    ["k", 1e3],
  ]) {
    if (value >= scale) return `${figures(value / scale)} ${prefix}`;
  }
  return `${figures(value)} `;
}

function formatShare(part, whole) {
  return `${whole ? ((100 * part) / whole).toFixed(1) : "0.0"}%`;
}

/** Round times (ns) from `from` to `to`, at least `apart` ns apart, and how to write them. */
function timeTicks(from, to, apart) {
  const power = 10 ** Math.floor(Math.log10(Math.max(apart, 1)));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= apart);
  const decimals = Math.max(0, 6 - Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  for (let n = Math.ceil(from / step); n * step <= to; n += 1) ticks.push(n * step);
  return { ticks, step, write: (ns) => `${(ns / 1e6).toFixed(decimals)} ms` };
}
