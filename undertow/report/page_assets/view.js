// What part of the step is seen, and how that changes: at once while dragging, gliding otherwise.

const GLIDE_MS = 160;
const SHORTEST_NS = 200;
const MARGIN = 0.015; // of the step, left and right of it

class View {
  constructor(total, onChange) {
    this.low = -total * MARGIN;
    this.high = total * (1 + MARGIN * 2);
    this.from = this.low;
    this.to = this.high;
    this.width = 1; // px
    this.onChange = onChange;
    this.glide = null;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
  }

  get scale() {
    return this.width / (this.to - this.from); // px per ns
  }

  x(ns) {
    return (ns - this.from) * this.scale;
  }

  at(x) {
    return this.from + x / this.scale;
  }

  /** Show [from, to], as far as it is within bounds. */
  show(from, to, { smooth = false } = {}) {
    const span = Math.min(Math.max(to - from, SHORTEST_NS), this.high - this.low);
    let start = (from + to) / 2 - span / 2;
    start = Math.min(Math.max(start, this.low), this.high - span);
    const target = [start, start + span];
    if (!smooth || this.still.matches) {
      this.glide = null;
      [this.from, this.to] = target;
    } else {
      this.glide = { since: performance.now(), origin: [this.from, this.to], target };
    }
    this.onChange();
  }

  /** One frame of gliding; whether there is more to come. */
  advance(now) {
    if (!this.glide) return false;
    const { since, origin, target } = this.glide;
    const time = Math.min(Math.max((now - since) / GLIDE_MS, 0), 1);
    const eased = 1 - (1 - time) ** 3;
    this.from = origin[0] + (target[0] - origin[0]) * eased;
    this.to = origin[1] + (target[1] - origin[1]) * eased;
    if (time === 1) this.glide = null;
    return this.glide !== null;
  }

  /** Where it is, or where it is gliding to. */
  get goal() {
    return this.glide ? this.glide.target : [this.from, this.to];
  }

  zoom(factor, around, options) {
    const [from, to] = this.goal;
    this.show(around - (around - from) * factor, around + (to - around) * factor, options);
  }

  zoomAtCentre(factor) {
    const [from, to] = this.goal;
    this.zoom(factor, (from + to) / 2, { smooth: true });
  }

  pan(ns, options) {
    const [from, to] = this.goal;
    this.show(from + ns, to + ns, options);
  }

  whole() {
    this.show(this.low, this.high, { smooth: true });
  }

  /** Bring [begin, end] into sight; closer only if it would be too narrow to see. */
  reveal(begin, end, { close = false } = {}) {
    const [from, to] = this.goal;
    const least = Math.max(end - begin, SHORTEST_NS / 20);
    let span = to - from;
    if (close) span = least * 8;
    else if ((least / span) * this.width < 24) span = (least * this.width) / 60;
    else if (least > span) span = least * 1.4;
    const middle = (begin + end) / 2;
    const isInside = begin >= from && end <= to && span === to - from;
    if (!isInside) this.show(middle - span / 2, middle + span / 2, { smooth: true });
  }
}
