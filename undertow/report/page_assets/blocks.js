// Tasks of one lane as blocks. What is too narrow to be a block becomes part of a column: how much
// of that sliver of time each colour takes, stacked, so that a lane seen from afar shows its load.

const COLUMN = 2; // px
const NARROW = 2.5; // px
const LABEL_LEAST = 22; // px
const SHORT_KINDS = {
  all_gather: "AG",
  reduce_scatter: "RS",
  all_reduce: "AR",
  all_to_all: "A2A",
  broadcast: "BC",
};

/** Per column, how many px of it each class takes. */
class Columns {
  constructor(classes) {
    this.classes = classes;
    this.count = 0;
    this.shares = new Float32Array(0);
    this.used = new Uint8Array(classes);
  }

  reset(width) {
    this.count = Math.ceil(width / COLUMN);
    if (this.shares.length !== this.count * this.classes) {
      this.shares = new Float32Array(this.count * this.classes);
    } else {
      this.shares.fill(0);
    }
    this.used.fill(0);
  }

  add(x0, x1, number) {
    const from = Math.max(x0, 0) / COLUMN;
    const to = Math.min(x1 / COLUMN, this.count);
    if (to <= from) return;
    this.used[number] = 1;
    const start = number * this.count;
    const first = Math.floor(from);
    const last = Math.min(Math.floor(to), this.count - 1);
    if (first === last) {
      this.shares[start + first] += to - from;
      return;
    }
    this.shares[start + first] += first + 1 - from;
    for (let column = first + 1; column < last; column += 1) this.shares[start + column] += 1;
    this.shares[start + last] += to - last;
  }

  /** Stacked from the bottom, in the order of the classes. */
  draw(context, top, height, styles) {
    const stacked = new Float32Array(this.count);
    for (let number = 0; number < this.classes; number += 1) {
      if (!this.used[number]) continue;
      context.fillStyle = styles[number];
      const start = number * this.count;
      for (let column = 0; column < this.count; column += 1) {
        const share = this.shares[start + column];
        if (share < 0.004) continue;
        const low = stacked[column];
        const high = Math.min(low + share, 1);
        context.fillRect(column * COLUMN, top + height * (1 - high), COLUMN, height * (high - low));
        stacked[column] = high;
      }
    }
  }
}

/** Draws the lanes of tracks; one for all, so that its arrays are made once. */
class BlockPainter {
  constructor(data) {
    this.data = data;
    this.kinds = data.colours.length;
    this.exposed = 2 * this.kinds; // classes: the colours, the same dimmed, exposed, that dimmed
    this.columns = new Columns(2 * this.kinds + 2);
    this.widths = new Map();
  }

  setPalette(palette) {
    this.palette = palette;
    this.styles = [...palette.fill, ...palette.dim, palette.exposedFar, palette.dimExposed];
    this.widths.clear();
  }

  /** `match` marks the rows that were searched for, or is null; `open` has the buckets that are
   *  shown as their members. */
  lane(context, view, track, row, { match, open }) {
    const { lane, top, height } = row;
    const { from, to, scale, width } = view;
    const wide = [];
    this.columns.reset(width);
    const last = firstAbove(track.begin, to, lane.first, lane.last);
    for (let i = firstAbove(track.reach, from, lane.first, lane.last); i < last; i += 1) {
      const x0 = (track.begin[i] - from) * scale;
      const x1 = (track.end[i] - from) * scale;
      const isMatch = match !== null && match[i] === 1;
      if (x1 - x0 >= NARROW || isMatch) wide.push(i);
      else this.columns.add(x0, x1, track.colour[i] + (match !== null ? this.kinds : 0));
    }
    const held = lane.role === "compute" ? this.narrowHeld(view, track, match) : [];
    this.columns.draw(context, top, height, this.styles);
    for (const i of wide) this.block(context, view, track, i, top, height, match, open);
    for (const i of held) this.heldBlock(context, view, track, i, top, height, match);
    if (lane.role === "group") this.underline(context, view, track, lane, top, height);
  }

  /** Time that compute stands still: narrow pieces go into the columns, the others are returned. */
  narrowHeld(view, track, match) {
    const { held } = track;
    const { from, to, scale } = view;
    const wide = [];
    const last = firstAbove(held.begin, to, 0, held.begin.length);
    for (let i = firstAbove(held.reach, from, 0, held.begin.length); i < last; i += 1) {
      const x0 = (held.begin[i] - from) * scale;
      const x1 = (held.end[i] - from) * scale;
      const isDim = match !== null && match[held.row[i]] !== 1;
      if (x1 - x0 >= NARROW) wide.push(i);
      else this.columns.add(x0, x1, this.exposed + (isDim ? 1 : 0));
    }
    return wide;
  }

  block(context, view, track, i, top, height, match, open) {
    const x0 = Math.max(view.x(track.begin[i]), -4);
    const x1 = Math.min(view.x(track.end[i]), view.width + 4);
    const isDim = match !== null && match[i] !== 1;
    // A gap of one pixel keeps neighbours apart; it must not swallow a narrow block.
    const shown = Math.max(x1 - x0 - 1, (x1 - x0) / 2, match !== null && !isDim ? 2 : 0);
    const colour = track.colour[i];
    context.fillStyle = isDim ? this.palette.dim[colour] : this.palette.fill[colour];
    context.fillRect(x0, top, shown, height);
    const members = track.buckets.get(i);
    if (members && open.has(`${track.index}:${i}`)) {
      this.members(context, view, track, i, members, top, height);
      return;
    }
    if (members && shown > 8) this.stackEdge(context, x0, shown, top, height);
    if (shown >= LABEL_LEAST && height >= 14) {
      context.fillStyle = isDim ? this.palette.soft : this.palette.inkOn[colour];
      this.label(context, this.text(track, i), x0, shown, top, height);
    }
  }

  /** A bucket's edge looks like a pile of sheets. */
  stackEdge(context, x, width, top, height) {
    context.fillStyle = this.palette.paper;
    context.globalAlpha = 0.55;
    context.fillRect(x, top + height - 3, width, 1);
    context.fillRect(x, top + height - 6, width, 1);
    context.globalAlpha = 1;
  }

  members(context, view, track, i, members, top, height) {
    const sizes = members.map((member) => Math.max(member.nbytes, 0));
    const total = sizes.reduce((sum, size) => sum + size, 0);
    const common = `${this.data.module(track, i)}.`;
    let at = track.begin[i];
    members.forEach((member, number) => {
      const share = total ? sizes[number] / total : 1 / members.length;
      const from = at;
      at += share * (track.end[i] - track.begin[i]);
      const [x0, x1] = [view.x(from), view.x(at)];
      context.fillStyle = this.palette.paper;
      if (number) context.fillRect(x0, top, 1, height);
      if (x1 - x0 >= LABEL_LEAST && x1 > 0 && x0 < view.width) {
        context.fillStyle = this.palette.inkOn[track.colour[i]];
        const left = Math.max(x0, 0);
        const name = member.module || member.name;
        const texts = [name, name.startsWith(common) ? name.slice(common.length) : name];
        this.label(context, texts, left, Math.min(x1, view.width) - left, top, height);
      }
    });
  }

  heldBlock(context, view, track, i, top, height, match) {
    const { held } = track;
    const x0 = Math.max(view.x(held.begin[i]), -4);
    const x1 = Math.min(view.x(held.end[i]), view.width + 4);
    const isDim = match !== null && match[held.row[i]] !== 1;
    const width = Math.max(x1 - x0 - 0.5, 1);
    context.globalAlpha = isDim ? 0.25 : 1;
    if (width < 6) {
      context.fillStyle = this.palette.exposedFar;
      context.fillRect(x0, top, width, height);
    } else {
      context.fillStyle = this.palette.hatch;
      context.fillRect(x0, top, width, height);
      context.strokeStyle = this.palette.exposed;
      context.lineWidth = 1;
      context.strokeRect(x0 + 0.5, top + 0.5, width - 1, height - 1);
    }
    context.globalAlpha = 1;
    const text = `exposed ${formatNs(held.end[i] - held.begin[i])}`;
    const needed = this.measure(context, text) + 10;
    if (width > needed + 8 && !isDim) {
      const middle = (Math.max(x0, 0) + Math.min(x1, view.width)) / 2;
      context.fillStyle = this.palette["exposed-paper"];
      context.fillRect(middle - needed / 2, top + height / 2 - 8, needed, 16);
      context.fillStyle = this.palette.ink;
      context.textAlign = "center";
      context.fillText(text, middle, top + height / 2 + 0.5);
      context.textAlign = "start";
    }
  }

  /** On a group's lane, a red line under the part of a collective that compute waits for. */
  underline(context, view, track, lane, top, height) {
    const { held } = track;
    const { from, to, scale } = view;
    context.fillStyle = this.palette.exposed;
    const last = firstAbove(held.begin, to, 0, held.begin.length);
    for (let i = firstAbove(held.reach, from, 0, held.begin.length); i < last; i += 1) {
      const row = held.row[i];
      if (track.laneOf[row] !== lane.number) continue;
      const x0 = (Math.max(held.begin[i], track.begin[row]) - from) * scale;
      const x1 = (Math.min(held.end[i], track.end[row]) - from) * scale;
      if (x1 - x0 >= NARROW) context.fillRect(x0, top + height - 2, x1 - x0 - 0.5, 3);
    }
  }

  /** What may be written into a block, the longest first. */
  text(track, i) {
    const { data } = this;
    const name = data.name(track, i);
    const module = data.module(track, i);
    if (!track.collective.has(i)) {
      const base = data.strings[track.base[i]];
      return module ? [`${name}  ${module}`, name, base] : [name, base];
    }
    const { op } = data.describe(track, i);
    const members = track.buckets.get(i);
    const count = members ? ` ×${members.length}` : "";
    if (!op) return [`${name}${count}  ${module}`.trimEnd(), `${name}${count}`];
    return [
      `${op}${count}  ${module || name}`,
      `${op}${count}`,
      `${SHORT_KINDS[op] ?? op}${count}`,
    ];
  }

  /** The longest of `texts` that fits, or the beginning of the last. */
  label(context, texts, x, width, top, height) {
    const left = Math.max(x, 0) + 5;
    const room = x + width - left - 4;
    let text = texts.find((candidate) => this.measure(context, candidate) <= room);
    if (text === undefined) {
      const shortest = texts.at(-1);
      const letters = Math.floor((room / this.measure(context, shortest)) * shortest.length) - 1;
      if (letters < 3) return;
      text = `${shortest.slice(0, letters)}…`;
    }
    context.fillText(text, left, top + height / 2 + 0.5);
  }

  measure(context, text) {
    let width = this.widths.get(text);
    if (width === undefined) {
      if (this.widths.size > 20000) this.widths.clear();
      width = context.measureText(text).width;
      this.widths.set(text, width);
    }
    return width;
  }
}
