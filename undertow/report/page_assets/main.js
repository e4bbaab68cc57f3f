// Puts the page together: one state, drawn when something changed, at most once a frame.

const KEPT_FRAMES = 600;

class App {
  constructor(data) {
    this.data = data;
    this.chart = document.getElementById("chart");
    this.view = new View(data.total, () => this.invalidate());
    this.painter = new BlockPainter(data);
    this.memoryTop = memoryTop(data.tracks);
    this.selected = null;
    this.hover = null;
    this.match = null; // per track, which rows were searched for
    this.open = new Set(); // buckets shown as members, "track:row"
    this.range = null; // being drawn, in ns
    this.frames = []; // how long drawing took, in ms, with when
    this.rowsByName = new Map();
    this.isDue = false;
    this.card = new Card(this);
    this.overview = new Overview(this);
    this.views = [...document.querySelectorAll(".track")].map(
      (box, index) => new TrackView(box, data.tracks[index], this),
    );
    this.search = new Search(this);
  }

  start() {
    startTheme(() => this.restyle());
    this.views.forEach((trackView) => startPointer(this, trackView));
    startOverviewPointer(this);
    startWheel(this);
    startKeys(this);
    startButtons(this);
    buildExposedTables(this);
    new ResizeObserver(() => this.resize()).observe(this.overview.canvas.parentElement);
    this.resize();
    this.draw(performance.now());
    // The canvases keep their size on paper; a page as wide as the window is shrunk as a whole.
    addEventListener("beforeprint", () => {
      document.body.style.width = `${document.body.clientWidth}px`;
      this.draw(performance.now(), true);
    });
    addEventListener("afterprint", () => {
      document.body.style.width = "";
    });
  }

  restyle() {
    this.palette = readPalette(this.data.colours);
    this.painter.setPalette(this.palette);
    this.overview.isStale = true;
    this.invalidate();
  }

  resize() {
    const width = this.overview.canvas.parentElement.clientWidth;
    if (!width) return;
    if (this.ratio !== devicePixelRatio) this.restyle(); // the hatching is made of pixels
    this.ratio = devicePixelRatio;
    this.view.width = width;
    this.overview.resize(width);
    this.invalidate();
  }

  invalidate() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame((now) => {
      this.isDue = false;
      if (this.view.advance(now)) this.invalidate();
      this.draw(now);
    });
  }

  draw(now, isAll = false) {
    const since = performance.now();
    const { view } = this;
    this.ticks = timeTicks(view.from, view.to, TICK_APART / view.scale);
    this.overview.draw();
    for (const trackView of this.views) {
      if ((trackView.isSeen || isAll) && !trackView.body.hidden) trackView.draw();
    }
    this.placePinned();
    this.frames.push({ at: now, ms: performance.now() - since });
    if (this.frames.length > KEPT_FRAMES) this.frames.shift();
  }

  // -- what is selected, what is under the pointer ------------------------------------------------

  setHover(target, place = null, canvas = null) {
    const isSame =
      this.hover && target && this.hover.track === target.track && this.hover.row === target.row;
    if (!isSame) this.invalidate();
    this.hover = target;
    canvas?.classList.toggle("over", Boolean(target && target.row >= 0));
    const isSelected =
      this.selected &&
      target &&
      this.selected.track === target.track &&
      this.selected.row === target.row;
    if (target && !isSelected) this.card.show(target, place, false);
    else if (!this.selected) this.card.hide();
    else if (!this.card.isPinned) this.showPinned(); // not anew: its buttons would lose the focus
  }

  /** Select a task: bring it into sight, show its card, say what it is. */
  select({ track, row }, { close = false, scroll = false, focus = false } = {}) {
    this.selected = { track, row };
    this.hover = null;
    this.view.reveal(track.begin[row], track.end[row], { close });
    const { canvas } = this.views[track.index];
    this.views[track.index].fold(false);
    if (scroll) {
      const box = canvas.getBoundingClientRect();
      if (box.top < 70 || box.bottom > innerHeight) canvas.scrollIntoView({ block: "center" });
    }
    if (focus) this.chart.focus({ preventScroll: true });
    this.showPinned();
    this.card.announce(this.selected);
    this.invalidate();
  }

  deselect() {
    this.selected = null;
    this.card.hide();
    this.invalidate();
  }

  showPinned() {
    if (this.selected) this.card.show(this.selected, this.placeOf(this.selected), true);
  }

  /** While what is seen moves, the pinned card goes with its task. */
  placePinned() {
    if (this.selected && this.card.isPinned) {
      this.card.put(this.placeOf(this.selected));
    }
  }

  placeOf({ track, row }) {
    const trackView = this.views[track.index];
    const box = trackView.canvas.getBoundingClientRect();
    const place = trackView.laneRow(row);
    const [begin, end] = [this.view.x(track.begin[row]), this.view.x(track.end[row])];
    const x = Math.min(Math.max(Math.min(end, begin + 220), 0), this.view.width);
    return {
      x: box.left + scrollX + x,
      y: box.top + scrollY + place.top + place.height,
      above: box.top + scrollY + place.top,
      isFar: true,
    };
  }

  /** The row of the same task in another track, itself or the bucket that it is in; -1 for none. */
  twin({ track, row }, other) {
    const rows = this.namesOf(other);
    const name = this.data.name(track, row);
    const found = rows.get(name);
    if (found !== undefined) return found;
    for (const member of track.buckets.get(row) ?? []) {
      if (rows.has(member.name)) return rows.get(member.name);
    }
    return -1;
  }

  namesOf(track) {
    if (!this.rowsByName.has(track)) {
      const rows = new Map();
      for (const [row, members] of track.buckets) {
        for (const member of members) rows.set(member.name, row);
      }
      for (let row = 0; row < track.count; row += 1) rows.set(this.data.name(track, row), row);
      this.rowsByName.set(track, rows);
    }
    return this.rowsByName.get(track);
  }

  setMatch(match) {
    this.match = match;
    this.overview.isStale = true;
    this.invalidate();
  }

  isOpen({ track, row }) {
    return this.open.has(`${track.index}:${row}`);
  }

  toggleBucket({ track, row }) {
    const key = `${track.index}:${row}`;
    if (!this.open.delete(key)) this.open.add(key);
    this.select({ track, row }, { focus: true });
  }

  // -- steps by key -------------------------------------------------------------------------------

  /** Take the task nearest the middle of what is seen; of a selected bucket, open or close it. */
  enter() {
    if (this.selected) {
      if (this.selected.track.buckets.has(this.selected.row)) this.toggleBucket(this.selected);
      return;
    }
    const trackView =
      this.views.find((candidate) => candidate.isSeen && !candidate.body.hidden) ?? this.views[0];
    const lane = trackView.track.lanes.find((candidate) => candidate.count);
    if (lane) this.selectNear(trackView.track, lane, (this.view.goal[0] + this.view.goal[1]) / 2);
  }

  selectNear(track, lane, ns) {
    const row = nearest(track.begin, track.end, track.reach, ns, Infinity, lane.first, lane.last);
    const next =
      row >= 0 ? row : Math.min(firstAbove(track.begin, ns, lane.first, lane.last), lane.last - 1);
    this.select({ track, row: next });
  }

  stepInLane(by) {
    const { track, row } = this.selected;
    const lane = track.lanes[track.laneOf[row]];
    let next = row + by;
    // Tasks of no duration cannot be seen; search finds them.
    while (next >= lane.first && next < lane.last && track.end[next] === track.begin[next])
      next += by;
    if (next >= lane.first && next < lane.last) this.select({ track, row: next });
  }

  /** To the lane above or below, of the next track after the last. */
  stepLane(by) {
    const lanes = this.views.flatMap((trackView) =>
      trackView.layout.rows
        .filter((row) => row.kind === "lane" && row.lane.count)
        .map((row) => ({ track: trackView.track, lane: row.lane })),
    );
    const { track, row } = this.selected;
    const at = lanes.findIndex(
      (entry) => entry.track === track && entry.lane.number === track.laneOf[row],
    );
    const next = lanes[at + by];
    if (next) this.selectNear(next.track, next.lane, (track.begin[row] + track.end[row]) / 2);
  }

  /** The next collective in time that is exposed, in the selected track or else the last. */
  stepExposed(by) {
    const track = this.selected?.track ?? this.data.tracks.at(-1);
    const rows = exposedRows(track).sort((a, b) => track.begin[a] - track.begin[b]);
    if (!rows.length) return;
    const now = this.selected ? track.begin[this.selected.row] : -1;
    const after = rows.findIndex((row) => track.begin[row] > now);
    const before = rows.findLastIndex((row) => track.begin[row] < now);
    const next = by > 0 ? (after < 0 ? 0 : after) : before < 0 ? rows.length - 1 : before;
    this.select({ track, row: rows[next] }, { scroll: true, focus: true });
  }
}

const app = new App(decode(JSON.parse(document.getElementById("data").textContent)));
app.start();
// For tests and for the curious: the state, and how long each frame took to draw.
window.undertowPage = Object.assign(app, { formatNs, formatBytes });
performance.mark("undertow drawn");
