// Where in a track's canvas its rows are: modules, compute, groups, host, memory.

const BAND_HEIGHT = 16;
const COMPUTE_HEIGHT = 38;
const GROUP_HEIGHT = 28;
const HOST_HEIGHT = 16;
const MEMORY_HEIGHT = 68;
const ROW_GAP = 5;
const TOP = 16; // room for the names of the lines across the track

/** {rows: [{kind, lane, top, height}], height} in px. */
function layOut(track, bands) {
  const rows = [];
  let top = TOP;
  const add = (kind, height, lane = null) => {
    rows.push({ kind, lane, top, height });
    top += height + ROW_GAP;
  };
  if (bands.length) add("modules", BAND_HEIGHT);
  const compute = track.lanes.find((lane) => lane.role === "compute");
  if (compute) add("lane", COMPUTE_HEIGHT, compute);
  for (const lane of track.lanes) {
    if (lane.role === "group" && lane.count) add("lane", GROUP_HEIGHT, lane);
  }
  for (const lane of track.lanes) {
    if (lane.role === "host" && lane.count) add("lane", HOST_HEIGHT, lane);
  }
  if (track.memory.at.length) {
    top += 8;
    add("memory", MEMORY_HEIGHT);
  }
  return { rows, height: top };
}

/** The names left of a track's rows. */
function labelRows(gutter, track, layout) {
  gutter.replaceChildren();
  for (const row of layout.rows) {
    const label = document.createElement("span");
    label.style.top = `${row.top}px`;
    label.style.height = `${row.height}px`;
    const [name, more] = rowNames(track, row);
    label.append(name);
    label.title = more ? `${name}, ${more}` : name;
    if (more && row.height >= GROUP_HEIGHT) {
      const small = document.createElement("small");
      small.textContent = more;
      label.append(small);
    }
    gutter.append(label);
  }
}

function rowNames(track, row) {
  if (row.kind === "modules") return ["modules", ""];
  if (row.kind === "memory") return ["memory", `peak ${formatBytes(track.peak)}`];
  const { name, role, ranks } = row.lane;
  return [name, role === "group" && ranks ? `${ranks} ranks` : ""];
}

/** Runs of compute that come from one module (two levels of its path): what the step is at. */
function moduleBands(track, data) {
  const compute = track.lanes.find((lane) => lane.role === "compute");
  const bands = [];
  const prefixes = new Map();
  const prefixOf = (index) => {
    if (!prefixes.has(index))
      prefixes.set(index, data.strings[index].split(".").slice(0, 2).join("."));
    return prefixes.get(index);
  };
  for (let row = compute?.first ?? 0; row < (compute?.last ?? 0); row += 1) {
    const name = prefixOf(track.module[row]);
    const [begin, end] = [track.begin[row], track.end[row]];
    if (!name || end === begin) continue;
    const last = bands.at(-1);
    if (last && last.name === name) {
      last.end = Math.max(last.end, end);
      last.busy += end - begin;
    } else {
      bands.push({ name, begin, end, busy: end - begin });
    }
  }
  return smoothed(bands);
}

/** Without the short excursions of a schedule that mixes layers: they would hide where it is. */
function smoothed(bands) {
  const kept = [];
  for (const band of bands) {
    kept.push({ ...band });
    while (kept.length >= 3) {
      const [before, inside, after] = kept.slice(-3);
      const isReturn = before.name === after.name && inside.busy <= before.busy + after.busy;
      const isSliver = inside.busy * 12 < Math.max(before.busy, after.busy);
      if (!isReturn && !isSliver) break;
      kept.length -= 2;
      const absorbed = before.name === after.name ? [inside, after] : [inside];
      for (const { end, busy } of absorbed) {
        before.end = end;
        before.busy += busy;
      }
      if (before.name !== after.name) kept.push(after);
    }
  }
  return kept;
}
