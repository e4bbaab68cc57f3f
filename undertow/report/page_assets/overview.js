// The strip on top: the whole step of up to four tracks, and a window on what is seen; the axis.

const OVERVIEW_HEIGHT = 34;
const AXIS_HEIGHT = 24;
const MOST_STRIPS = 4;
const TICK_APART = 92; // px

class Overview {
  constructor(app) {
    this.app = app;
    this.canvas = document.getElementById("overview");
    this.context = this.canvas.getContext("2d", { alpha: false });
    this.axis = document.getElementById("axis");
    this.axisContext = this.axis.getContext("2d", { alpha: false });
    this.base = document.createElement("canvas");
  }

  resize(width) {
    for (const [canvas, height] of [
      [this.canvas, OVERVIEW_HEIGHT],
      [this.axis, AXIS_HEIGHT],
      [this.base, OVERVIEW_HEIGHT],
    ]) {
      canvas.width = Math.round(width * devicePixelRatio);
      canvas.height = Math.round(height * devicePixelRatio);
    }
    this.isStale = true;
  }

  /** The strips, which change only with size, colours and search. */
  drawBase() {
    const { app } = this;
    const context = this.base.getContext("2d", { alpha: false });
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.fillStyle = app.palette.panel;
    context.fillRect(0, 0, app.view.width, OVERVIEW_HEIGHT);
    const tracks = app.data.tracks.slice(0, MOST_STRIPS);
    const height = (OVERVIEW_HEIGHT - 6) / tracks.length - 2;
    const whole = new View(app.data.total, () => {});
    whole.width = app.view.width;
    tracks.forEach((track, number) => {
      const lane = track.lanes.find((candidate) => candidate.role === "compute");
      const top = 4 + number * (height + 2);
      if (lane) this.drawStrip(context, whole, track, lane, top, height);
      const match = app.match?.[track.index];
      if (match) this.drawMatches(context, whole, track, match, top, height);
    });
    this.isStale = false;
  }

  drawStrip(context, whole, track, lane, top, height) {
    const { painter } = this.app;
    const { from, scale } = whole;
    const x = (ns) => (ns - from) * scale;
    painter.columns.reset(whole.width);
    for (let i = lane.first; i < lane.last; i += 1) {
      painter.columns.add(x(track.begin[i]), x(track.end[i]), track.colour[i]);
    }
    const { held } = track;
    for (let i = 0; i < held.begin.length; i += 1) {
      painter.columns.add(x(held.begin[i]), x(held.end[i]), painter.exposed);
    }
    painter.columns.draw(context, top, height, painter.styles);
  }

  drawMatches(context, whole, track, match, top, height) {
    context.fillStyle = this.app.palette.ink;
    let last = -2;
    for (let i = 0; i < track.count; i += 1) {
      const x = Math.round(whole.x(track.begin[i]));
      if (!match[i] || x === last) continue;
      context.fillRect(x, top, 1, height);
      last = x;
    }
  }

  draw() {
    const { app, context } = this;
    const { view, palette } = app;
    if (this.isStale) this.drawBase();
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.drawImage(this.base, 0, 0);
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    const [x0, x1] = this.window();
    context.fillStyle = palette.paper;
    context.globalAlpha = 0.68;
    context.fillRect(0, 0, x0, OVERVIEW_HEIGHT);
    context.fillRect(x1, 0, view.width - x1, OVERVIEW_HEIGHT);
    context.globalAlpha = 1;
    context.strokeStyle = palette.soft;
    context.lineWidth = 1;
    context.strokeRect(
      Math.max(x0, 0) + 0.5,
      1.5,
      Math.min(x1, view.width) - Math.max(x0, 0) - 1,
      OVERVIEW_HEIGHT - 3,
    );
    this.drawAxis();
  }

  window() {
    const { view } = this.app;
    const scale = view.width / (view.high - view.low);
    const x0 = (view.from - view.low) * scale;
    return [x0, Math.max((view.to - view.low) * scale, x0 + 3)];
  }

  drawAxis() {
    const { app, axisContext: context } = this;
    const { view, palette } = app;
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.fillStyle = palette.paper;
    context.fillRect(0, 0, view.width, AXIS_HEIGHT);
    context.font = `11px ${palette.font}`;
    context.textBaseline = "middle";
    context.textAlign = "center";
    for (const tick of app.ticks.ticks) {
      const x = Math.round(view.x(tick));
      context.fillStyle = palette.soft;
      context.fillRect(x, AXIS_HEIGHT - 5, 1, 5);
      const text = app.ticks.write(tick);
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(Math.max(x, half + 1), view.width - half - 1), 10);
    }
  }

  /** The time that a point of the strip stands for. */
  at(x) {
    const { view } = this.app;
    return view.low + (x / view.width) * (view.high - view.low);
  }
}
