// One track's canvas: draws it, and tells what is under a point.

const NEAR = 3; // px by which a pointer may miss a block

class TrackView {
  constructor(element, track, app) {
    this.track = track;
    this.app = app;
    this.body = element.querySelector(".track-body");
    this.canvas = element.querySelector("canvas");
    this.context = this.canvas.getContext("2d", { alpha: false });
    this.bands = moduleBands(track, app.data);
    this.layout = layOut(track, this.bands);
    labelRows(element.querySelector(".gutter"), track, this.layout);
    this.canvas.style.height = `${this.layout.height}px`;
    element.querySelector(".gutter").style.height = `${this.layout.height}px`;
    this.button = element.querySelector(".fold");
    this.button.addEventListener("click", () => this.fold(!this.body.hidden));
    this.isSeen = this.canvas.getBoundingClientRect().top < innerHeight;
    new IntersectionObserver(
      ([entry]) => {
        this.isSeen = entry.isIntersecting;
        if (this.isSeen) app.invalidate();
        else this.canvas.width = 0; // pixels of sixty tracks would be much memory
      },
      { rootMargin: "200px" },
    ).observe(this.canvas);
  }

  fold(isFolded) {
    this.body.hidden = isFolded;
    this.button.setAttribute("aria-expanded", String(!isFolded));
    this.app.invalidate();
  }

  /** As many pixels as the screen has; setting them anew would clear the canvas for nothing. */
  resize() {
    const width = Math.round(this.app.view.width * devicePixelRatio);
    const height = Math.round(this.layout.height * devicePixelRatio);
    if (this.canvas.width === width && this.canvas.height === height) return;
    this.canvas.width = width;
    this.canvas.height = height;
  }

  draw() {
    const { app, context, track } = this;
    const { view, palette, painter } = app;
    this.resize();
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.fillStyle = palette.paper;
    context.fillRect(0, 0, view.width, this.layout.height);
    context.font = `11px ${palette.font}`;
    context.textBaseline = "middle";
    this.drawGrid();
    const shown = { match: app.match ? app.match[track.index] : null, open: app.open };
    for (const row of this.layout.rows) {
      if (row.kind === "modules") this.drawBands(row);
      else if (row.kind === "memory") drawMemory(context, view, track, row, app.memoryTop, palette);
      else painter.lane(context, view, track, row, shown);
    }
    this.drawLines();
    const memory = this.layout.rows.find((row) => row.kind === "memory");
    if (memory) drawLimits(context, view, track, memory, app.memoryTop, palette);
    this.drawSelected();
    this.drawRange();
  }

  drawGrid() {
    const { view, palette } = this.app;
    const end = Math.max(view.x(this.track.total), 0);
    this.context.fillStyle = palette.panel;
    if (end < view.width) this.context.fillRect(end, 0, view.width - end, this.layout.height);
    this.context.fillStyle = palette.grid;
    for (const tick of this.app.ticks.ticks) {
      this.context.fillRect(Math.round(view.x(tick)), 0, 1, this.layout.height);
    }
    for (const row of this.layout.rows) {
      if (row.kind !== "lane") continue;
      this.context.fillStyle = palette.grid;
      this.context.fillRect(0, row.top + row.height, view.width, 1);
    }
  }

  drawBands(row) {
    const { view, palette, painter } = this.app;
    const context = this.context;
    this.bands.forEach((band, number) => {
      const x0 = Math.max(view.x(band.begin), 0);
      const x1 = Math.min(view.x(band.end), view.width);
      if (x1 - x0 < 1.5) return;
      context.fillStyle = palette[number % 2 ? "band-a" : "band-b"];
      context.fillRect(x0, row.top, x1 - x0, row.height);
      context.fillStyle = palette.soft;
      const short = band.name.split(".").at(-1);
      if (x1 - x0 > 12)
        painter.label(context, [band.name, short], x0 - 2, x1 - x0 + 4, row.top, row.height);
    });
  }

  /** The end of the step and its lower bound. */
  drawLines() {
    const { view, palette } = this.app;
    const { track, context } = this;
    const bottom = this.layout.height;
    const end = view.x(track.total);
    const names = [[end, palette.soft, [], `step ${formatNs(track.total)}`]];
    if (track.bound !== null) {
      names.push([
        view.x(track.bound),
        palette.bound,
        [4, 3],
        `lower bound ${formatNs(track.bound)}`,
      ]);
    }
    let taken = Infinity; // x from which on there is a name
    for (const [x, colour, dash, text] of names) {
      if (x < -1 || x > view.width + 1) continue;
      context.strokeStyle = colour;
      context.lineWidth = dash.length ? 1.5 : 1;
      context.setLineDash(dash);
      context.beginPath();
      context.moveTo(x, 2);
      context.lineTo(x, bottom);
      context.stroke();
      context.setLineDash([]);
      const width = context.measureText(text).width;
      const isRight = x + width + 8 < Math.min(view.width, taken);
      const left = isRight ? x + 5 : x - width - 5;
      if (left + width > taken && taken < Infinity) continue;
      context.fillStyle = colour;
      context.fillText(text, left, 8);
      taken = left;
    }
  }

  laneRow(row) {
    return this.layout.rows.find((candidate) => candidate.lane?.number === this.track.laneOf[row]);
  }

  drawSelected() {
    const { app, track } = this;
    const { selected, hover } = app;
    if (hover && hover.track === track && hover.row >= 0) this.outline(hover.row, 1, []);
    if (!selected) return;
    if (selected.track === track) {
      this.drawJourney(selected.row);
      this.outline(selected.row, 2, []);
    } else {
      const twin = app.twin(selected, track);
      if (twin >= 0) this.outline(twin, 1.5, [4, 3]);
    }
  }

  outline(row, width, dash) {
    const { view, palette } = this.app;
    const { context, track } = this;
    const place = this.laneRow(row);
    if (!place) return;
    const x0 = Math.max(view.x(track.begin[row]), -6);
    const x1 = Math.min(Math.max(view.x(track.end[row]), x0 + 3), view.width + 6);
    context.strokeStyle = palette.ink;
    context.lineWidth = width;
    context.setLineDash(dash);
    context.strokeRect(x0 - 1, place.top - 1.5, x1 - x0 + 1, place.height + 3);
    context.setLineDash([]);
  }

  /** From where a collective is started on the compute lane to where it is waited for. */
  drawJourney(row) {
    const { view, palette } = this.app;
    const { context, track } = this;
    const facts = track.collective.get(row);
    const compute = this.layout.rows.find((candidate) => candidate.lane?.role === "compute");
    const place = this.laneRow(row);
    if (!facts || !compute || !place) return;
    const base = compute.top + compute.height;
    const path = [[track.begin[row] - facts.queued, track.begin[row]]];
    if (facts.waited >= 0) path.push([Math.max(facts.waited, track.end[row]), track.end[row]]);
    context.strokeStyle = palette.ink;
    context.fillStyle = palette.ink;
    context.lineWidth = 1.25;
    for (const [there, here] of path) {
      context.beginPath();
      context.moveTo(view.x(there), base);
      context.bezierCurveTo(
        view.x(there),
        base + 8,
        view.x(here),
        place.top - 8,
        view.x(here),
        place.top,
      );
      context.stroke();
      context.beginPath();
      context.arc(view.x(there), base, 3, 0, 7);
      context.fill();
    }
  }

  drawRange() {
    const { range, view, palette } = this.app;
    if (!range) return;
    const [from, to] = [Math.min(...range), Math.max(...range)];
    this.context.fillStyle = palette.accent;
    this.context.globalAlpha = 0.16;
    this.context.fillRect(view.x(from), 0, (to - from) * view.scale, this.layout.height);
    this.context.globalAlpha = 1;
  }

  /** {track, row, held?} of the task at a point, {track, memory} over the curve, {track, band}
   *  over a module, or null. */
  hit(x, y) {
    const { track } = this;
    const { view } = this.app;
    const place = this.layout.rows.find((row) => y >= row.top - 2 && y <= row.top + row.height + 2);
    if (!place) return null;
    const ns = view.at(x);
    if (place.kind === "modules") {
      const band = this.bands.find((candidate) => ns >= candidate.begin && ns <= candidate.end);
      return band ? { track, row: -1, band } : null;
    }
    if (place.kind === "memory") {
      return ns >= 0 && ns <= track.total
        ? { track, row: -1, memory: memoryAt(track, ns), ns }
        : null;
    }
    const near = NEAR / view.scale;
    const { lane } = place;
    if (lane.role === "compute") {
      const { held } = track;
      const i = nearest(held.begin, held.end, held.reach, ns, near / 3, 0, held.begin.length);
      if (i >= 0) return { track, row: held.row[i], held: i };
    }
    const row = nearest(track.begin, track.end, track.reach, ns, near, lane.first, lane.last);
    return row >= 0 ? { track, row } : null;
  }
}

/** The interval that holds `at`, or the nearest within `near`; -1 if there is none. */
function nearest(begin, end, reach, at, near, first, last) {
  let best = -1;
  let distance = near;
  const stop = firstAbove(begin, at + near, first, last);
  for (let i = firstAbove(reach, at - near, first, last); i < stop; i += 1) {
    const apart = Math.max(begin[i] - at, at - end[i], 0);
    const isBetter =
      apart < distance ||
      (apart === distance && best >= 0 && end[i] - begin[i] > end[best] - begin[best]);
    if (isBetter || (best < 0 && apart <= distance)) {
      best = i;
      distance = apart;
    }
  }
  return best;
}
