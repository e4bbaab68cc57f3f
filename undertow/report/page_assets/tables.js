// The table of exposed collectives, track by track; each name leads to its place.

const FIRST_ROWS = 8;
const MOST_ROWS = 500;

function buildExposedTables(app) {
  const host = document.getElementById("exposed-tables");
  // What is left when planned is what readers can still act on: the last track comes first.
  for (const track of [...app.data.tracks].reverse()) {
    host.append(element("h3", { text: tableTitle(track) }));
    const rows = exposedRows(track);
    if (!rows.length) {
      host.append(element("p", { className: "note", text: "No communication is exposed." }));
      continue;
    }
    const body = element("tbody");
    const head = element(
      "thead",
      {},
      element(
        "tr",
        {},
        ...["collective", "group", ">duration", ">exposed", ">of step", "why"].map(headCell),
      ),
    );
    host.append(element("div", { className: "scroll" }, element("table", {}, head, body)));
    addRows(app, track, body, rows.slice(0, FIRST_ROWS));
    if (rows.length > FIRST_ROWS) host.append(moreButton(app, track, body, rows));
  }
}

function tableTitle(track) {
  return `${track.name}: ${formatNs(track.exposedTotal)} exposed, ${formatShare(track.exposedTotal, track.total)} of the step`;
}

function headCell(name) {
  const cell = element("th", {
    text: name.replace(">", ""),
    className: name.startsWith(">") ? "number" : "",
  });
  cell.scope = "col";
  return cell;
}

/** Rows of exposed collectives, the most exposed first. */
function exposedRows(track) {
  return [...track.collective]
    .filter(([, facts]) => facts.exposed > 0)
    .sort(([a, x], [b, y]) => y.exposed - x.exposed || track.begin[a] - track.begin[b])
    .map(([row]) => row);
}

function addRows(app, track, body, rows) {
  const { data } = app;
  for (const row of rows) {
    const facts = track.collective.get(row);
    const link = element("button", { className: "link", text: data.name(track, row) });
    link.type = "button";
    link.dataset.row = row;
    link.addEventListener("click", () => app.select({ track, row }, { scroll: true, focus: true }));
    const name = element("td", {}, link);
    const module = data.module(track, row);
    const members = track.buckets.get(row);
    const more = [module, members ? `bucket of ${members.length}` : ""].filter(Boolean).join(", ");
    if (more) name.append(element("span", { className: "module", text: more }));
    body.append(
      element(
        "tr",
        {},
        name,
        element("td", { text: track.lanes[track.laneOf[row]].name }),
        element("td", { className: "number", text: formatNs(track.end[row] - track.begin[row]) }),
        element("td", { className: "number", text: formatNs(facts.exposed) }),
        element("td", { className: "number", text: formatShare(facts.exposed, track.total) }),
        element("td", { className: "why", text: facts.why >= 0 ? data.strings[facts.why] : "" }),
      ),
    );
  }
}

function moreButton(app, track, body, rows) {
  const rest = rows.slice(FIRST_ROWS, MOST_ROWS);
  const sum = rows.slice(FIRST_ROWS).reduce((ns, row) => ns + track.collective.get(row).exposed, 0);
  const count = rows.length - FIRST_ROWS;
  const button = element("button", {
    className: "more",
    text: `${count.toLocaleString("en")} more, ${formatNs(sum)} exposed`,
  });
  button.type = "button";
  button.addEventListener("click", () => {
    addRows(app, track, body, rest);
    const left = rows.length - MOST_ROWS;
    if (left > 0)
      button.replaceWith(
        element("p", {
          className: "note",
          text: `and ${left.toLocaleString("en")} more; search finds each`,
        }),
      );
    else button.remove();
  });
  return button;
}
