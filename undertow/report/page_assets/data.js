// The page's JSON, as undertow/report/page_data.py wrote it, turned back into typed arrays.
//
// A task is a row of its track's columns; rows are sorted by lane and begin. Times are ns.

function running(differences) {
  const values = new Float64Array(differences.length);
  let sum = 0;
  for (let i = 0; i < values.length; i += 1) {
    sum += differences[i];
    values[i] = sum;
  }
  return values;
}

function decodeTrack(raw, tables, index) {
  const count = raw.tasks.ns.length;
  const track = {
    index,
    name: raw.name,
    total: raw.total,
    exposedTotal: raw.exposed,
    peak: raw.peak,
    bound: raw.bound,
    limits: raw.limits.map(([name, nbytes]) => ({ name, nbytes })),
    count,
    begin: new Float64Array(count),
    end: new Float64Array(count),
    reach: new Float64Array(count), // the latest end so far in the lane: sorted, for searching
    laneOf: new Uint16Array(count),
    colour: new Uint8Array(count),
    base: raw.tasks.base,
    number: raw.tasks.number,
    module: raw.tasks.module,
    description: raw.tasks.description,
    alone: new Map(raw.stretched),
    collective: new Map(), // row -> {queued, waited, exposed, why}
    buckets: new Map(), // row -> members
    held: decodeHeld(raw.held),
    memory: { at: running(raw.memory.at), nbytes: running(raw.memory.nbytes) },
    lanes: [],
  };
  let first = 0;
  raw.lanes.forEach((lane, number) => {
    track.lanes.push({ ...lane, number, first, last: first + lane.count });
    decodeLane(track, raw.tasks, number, first, first + lane.count, tables);
    first += lane.count;
  });
  const { row, queued, waited, exposed, why } = raw.collectives;
  row.forEach((r, i) =>
    track.collective.set(r, {
      queued: queued[i],
      waited: waited[i],
      exposed: exposed[i],
      why: why[i],
    }),
  );
  for (const [r, members] of raw.buckets) {
    track.buckets.set(
      r,
      members.map(([base, number, module, nbytes]) => ({
        name: nameOf(tables.strings, base, number),
        module: tables.strings[module],
        nbytes,
      })),
    );
  }
  return track;
}

function decodeLane(track, tasks, lane, first, last, tables) {
  let at = 0;
  let reach = 0;
  for (let i = first; i < last; i += 1) {
    at += tasks.begin[i];
    track.begin[i] = at;
    track.end[i] = at + tasks.ns[i];
    reach = Math.max(reach, track.end[i]);
    track.reach[i] = reach;
    track.laneOf[i] = lane;
    track.colour[i] = tables.descriptions[tasks.description[i]][0];
  }
}

function decodeHeld(raw) {
  const begin = running(raw.begin);
  const end = begin.map((at, i) => at + raw.ns[i]);
  const reach = new Float64Array(end.length);
  end.forEach((at, i) => {
    reach[i] = Math.max(at, i ? reach[i - 1] : 0);
  });
  return { begin, end, reach, row: raw.row };
}

function nameOf(strings, base, number) {
  return number < 0 ? strings[base] : `${strings[base]}_${number}`;
}

/** All tracks, and how to read a task's texts. */
function decode(raw) {
  const { strings, descriptions, colours } = raw;
  const tracks = raw.tracks.map((track, index) => decodeTrack(track, raw, index));
  return {
    tracks,
    strings,
    colours: colours.map(([name, text]) => ({ name, text })),
    total: Math.max(1, ...tracks.map((track) => track.total)),
    name: (track, row) => nameOf(strings, track.base[row], track.number[row]),
    module: (track, row) => strings[track.module[row]],
    describe(track, row) {
      const [colour, source, op, details, nbytes, flops] = descriptions[track.description[row]];
      return {
        colour,
        source: strings[source],
        op: strings[op],
        details: strings[details],
        nbytes,
        flops,
      };
    },
  };
}

/** The first index in [low, high) at which `values`, ascending, is above `at`; else `high`. */
function firstAbove(values, at, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > at) high = middle;
    else low = middle + 1;
  }
  return low;
}
