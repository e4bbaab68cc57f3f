// The search box: what matches stays in colour, the rest fades; Enter goes from match to match.

class Search {
  constructor(app) {
    this.app = app;
    this.input = document.getElementById("search");
    this.found = document.getElementById("found");
    this.buttons = ["previous", "next"].map((id) => document.getElementById(id));
    this.texts = null;
    this.matches = [];
    this.at = -1;
    this.input.addEventListener("input", () => this.run());
    this.input.addEventListener("keydown", (event) => this.onKey(event));
    this.buttons[0].addEventListener("click", () => this.step(-1));
    this.buttons[1].addEventListener("click", () => this.step(1));
  }

  onKey(event) {
    if (event.key === "Enter") {
      this.step(event.shiftKey ? -1 : 1);
      event.preventDefault();
    } else if (event.key === "Escape") {
      this.clear();
      this.app.chart.focus();
      event.preventDefault();
    }
  }

  clear() {
    this.input.value = "";
    this.run();
  }

  /** Everything of a task that can be searched, in small letters; made at the first search. */
  textOf(track, row) {
    const { data } = this.app;
    const members = track.buckets.get(row) ?? [];
    const parts = [data.name(track, row), data.module(track, row), data.describe(track, row).op];
    for (const member of members) parts.push(member.name, member.module);
    return parts.join("\n").toLowerCase();
  }

  run() {
    const { app } = this;
    const wanted = this.input.value.trim().toLowerCase();
    this.matches = [];
    this.at = -1;
    if (!wanted) {
      app.setMatch(null);
      this.tell();
      return;
    }
    this.texts ??= app.data.tracks.map((track) =>
      Array.from({ length: track.count }, (_, row) => this.textOf(track, row)),
    );
    const match = app.data.tracks.map((track) => new Uint8Array(track.count));
    app.data.tracks.forEach((track, number) => {
      const texts = this.texts[number];
      const rows = [];
      for (let row = 0; row < track.count; row += 1) {
        if (texts[row].includes(wanted)) rows.push(row);
      }
      rows.sort((a, b) => track.begin[a] - track.begin[b]);
      for (const row of rows) {
        match[number][row] = 1;
        this.matches.push({ track, row });
      }
    });
    app.setMatch(match);
    this.tell();
  }

  tell() {
    const count = this.matches.length;
    const all = `${count.toLocaleString("en")} match${count === 1 ? "" : "es"}`;
    if (!this.input.value.trim()) this.found.textContent = "";
    else if (!count) this.found.textContent = "no match";
    else this.found.textContent = this.at < 0 ? all : `${this.at + 1} of ${all}`;
    for (const button of this.buttons) button.hidden = !count;
  }

  step(by) {
    const count = this.matches.length;
    if (!count) return;
    this.at = this.at < 0 ? (by > 0 ? 0 : count - 1) : (this.at + by + count) % count;
    this.tell();
    this.app.select(this.matches[this.at], { scroll: true });
  }
}
