// The card: what is known of a task, beside the pointer or, once selected, beside the task.

function element(name, { className = "", text = "" } = {}, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

/** What the card says of a task, as plain texts: also what is read out. */
function taskFacts(data, track, row) {
  const { colour, source, op, details, nbytes, flops } = data.describe(track, row);
  const took = track.end[row] - track.begin[row];
  const lane = track.lanes[track.laneOf[row]];
  const collective = track.collective.get(row);
  const lines = [];
  const seconds = took / 1e9;
  const what = [op, details].filter(Boolean).join(", ");
  if (what) lines.push(["what", what]);
  lines.push([
    "on",
    `${lane.name}${lane.ranks ? `, ${lane.ranks} ranks` : ""}, from ${formatAt(track.begin[row])}`,
  ]);
  lines.push(["duration", `${formatNs(took)}, priced by ${source}`]);
  if (track.alone.has(row))
    lines.push(["alone", `${formatNs(track.alone.get(row))} with nothing beside it`]);
  const speed = seconds > 0 && !collective ? `, ${formatRate(nbytes / seconds)}B/s` : "";
  if (nbytes >= 0 && collective) lines.push(["bytes", `${formatBytes(nbytes)} in on each rank`]);
  else if (nbytes > 0) lines.push(["bytes", `${formatBytes(nbytes)}${speed}`]);
  if (flops > 0) {
    const rate = seconds > 0 ? `, ${formatRate(flops / seconds)}flop/s` : "";
    lines.push(["work", `${formatRate(flops)}flop${rate}`]);
  }
  if (collective) {
    if (collective.queued > 0) lines.push(["queued", formatNs(collective.queued)]);
    const hidden = Math.max(took - collective.exposed, 0);
    lines.push(["hidden", `${formatNs(hidden)}, exposed ${formatNs(collective.exposed)}`]);
  }
  return {
    colour,
    name: data.name(track, row),
    module: data.module(track, row),
    lines,
    took,
    exposed: collective?.exposed ?? 0,
    isCollective: Boolean(collective),
    why: collective ? whySentence(data, collective) : "",
    members: track.buckets.get(row) ?? [],
  };
}

function whySentence(data, collective) {
  if (collective.exposed === 0) return "";
  return collective.why >= 0 ? `Exposed: ${data.strings[collective.why]}.` : "";
}

class Card {
  constructor(app) {
    this.app = app;
    this.box = document.getElementById("card");
    this.live = document.getElementById("live");
  }

  get isPinned() {
    return !this.box.hidden && this.box.classList.contains("pinned");
  }

  hide() {
    this.box.hidden = true;
    this.box.classList.remove("pinned");
  }

  /** `target` as `TrackView.hit` gives it; `place` in px of the page; `isPinned` if selected. */
  show(target, place, isPinned) {
    if (target.band) this.fillBand(target.band);
    else if (target.row < 0) this.fillMemory(target);
    else this.fill(taskFacts(this.app.data, target.track, target.row), target);
    this.box.classList.toggle("pinned", isPinned);
    this.box.hidden = false;
    this.put(place);
  }

  fillMemory({ track, memory, ns }) {
    const share = track.peak ? formatShare(memory, track.peak) : "";
    this.box.replaceChildren(
      element("h4", { text: formatBytes(memory) }),
      element("div", {
        className: "module",
        text: `live at ${formatAt(ns)}, ${share} of the peak`,
      }),
    );
  }

  fillBand({ name, begin, end }) {
    this.box.replaceChildren(
      element("h4", { text: name }),
      element("div", {
        className: "module",
        text: `${formatNs(end - begin)}, from ${formatAt(begin)}`,
      }),
    );
  }

  fill(facts, target) {
    const swatch = element("span", {
      className: `swatch ${this.app.data.colours[facts.colour].name}`,
    });
    const list = element("dl");
    for (const [name, value] of facts.lines) {
      list.append(element("dt", { text: name }), element("dd", { text: value }));
    }
    this.box.replaceChildren();
    if (target.held !== undefined) {
      const { begin, end } = target.track.held;
      const waited = formatNs(end[target.held] - begin[target.held]);
      this.box.append(element("div", { className: "bad", text: `compute waits ${waited} for` }));
    }
    this.box.append(element("h4", {}, swatch, element("span", { text: facts.name })));
    if (facts.module) this.box.append(element("div", { className: "module", text: facts.module }));
    this.box.append(list);
    if (facts.isCollective && facts.took > 0) this.box.append(this.bar(facts));
    if (facts.why) this.box.append(element("p", { className: "why", text: facts.why }));
    if (facts.members.length) this.box.append(this.members(facts, target));
    this.box.append(this.links(facts, target), this.close());
  }

  /** Hidden and exposed as one bar. */
  bar(facts) {
    const exposed = Math.min(facts.exposed / facts.took, 1);
    const parts = [1 - exposed, exposed].map((share) => {
      const part = element("i");
      part.style.flex = String(share);
      return part;
    });
    const bar = element("div", { className: "bar" }, ...parts);
    bar.setAttribute("aria-hidden", "true");
    return bar;
  }

  members(facts, target) {
    const isOpen = this.app.isOpen(target);
    if (!isOpen) {
      return element("p", {
        className: "why",
        text: `A bucket of ${facts.members.length} collectives that run as one.`,
      });
    }
    const list = element("ul", { className: "members" });
    for (const { name, module, nbytes } of facts.members) {
      const size = nbytes >= 0 ? formatBytes(nbytes) : "";
      list.append(
        element(
          "li",
          {},
          element("span", { text: module || name }),
          element("span", { text: size }),
        ),
      );
    }
    list.tabIndex = 0;
    list.setAttribute("aria-label", `${facts.members.length} members`);
    return list;
  }

  links(facts, target) {
    const { app } = this;
    const links = element("div", { className: "links" });
    const add = (text, act) => {
      const button = element("button", { text });
      button.type = "button";
      button.addEventListener("click", act);
      links.append(button);
      return button;
    };
    if (facts.members.length) {
      const isOpen = app.isOpen(target);
      const button = add(isOpen ? "Close the bucket" : "Open the bucket", () =>
        app.toggleBucket(target),
      );
      button.setAttribute("aria-expanded", String(isOpen));
    }
    add("Zoom to it", () => app.select(target, { close: true }));
    for (const track of app.data.tracks) {
      const twin = track === target.track ? -1 : app.twin(target, track);
      if (twin >= 0)
        add(`Show in ${track.name}`, () => app.select({ track, row: twin }, { scroll: true }));
    }
    return links;
  }

  close() {
    const button = element("button", { className: "close", text: "×" });
    button.type = "button";
    button.setAttribute("aria-label", "Close");
    button.addEventListener("click", () => this.app.deselect());
    return button;
  }

  /** Below and right of a point, or on its other side where there is no room. */
  put({ x, y, above = y, isFar = false }) {
    const { box } = this;
    const gap = isFar ? 10 : 16;
    const width = box.offsetWidth;
    const height = box.offsetHeight;
    const right = scrollX + document.documentElement.clientWidth;
    const bottom = scrollY + innerHeight;
    let left = x + gap;
    if (left + width > right - 8) left = Math.max(x - gap - width, scrollX + 8);
    let top = y + gap;
    if (top + height > bottom - 8) top = above - gap - height;
    if (top < scrollY + 8) top = Math.max(Math.min(y + gap, bottom - height - 8), scrollY + 8);
    box.style.left = `${left}px`;
    box.style.top = `${top}px`;
  }

  /** Say a task to those who listen. */
  announce({ track, row }) {
    const facts = taskFacts(this.app.data, track, row);
    const lines = facts.lines.map(([name, value]) => `${name}: ${value}`);
    const members = facts.members.length ? `A bucket of ${facts.members.length} collectives.` : "";
    this.live.textContent = [track.name, facts.name, facts.module, ...lines, facts.why, members]
      .filter(Boolean)
      .join(". ");
  }
}
