// Live memory over the step: the highest of each pixel, so that no peak is lost from afar.

function memoryTop(tracks) {
  const most = Math.max(...tracks.map((track) => track.peak));
  // A limit far above what is used would flatten the curve; its name then says so.
  const limits = tracks.flatMap((track) => track.limits.map((line) => line.nbytes));
  return Math.max(most, ...limits.filter((nbytes) => nbytes <= most * 1.6)) * 1.08;
}

function drawMemory(context, view, track, row, most, palette) {
  const { at, nbytes } = track.memory;
  const { top, height } = row;
  const bottom = top + height;
  const y = (value) => bottom - (value / most) * height;
  const columns = highest(view, at, nbytes);
  context.fillStyle = palette["memory-paper"];
  context.beginPath();
  context.moveTo(columns[0][0], bottom);
  for (const [x, value] of columns) context.lineTo(x, y(value));
  context.lineTo(columns.at(-1)[0], bottom);
  context.fill();
  context.strokeStyle = palette.memory;
  context.lineWidth = 1.25;
  context.beginPath();
  columns.forEach(([x, value], i) =>
    i ? context.lineTo(x, y(value)) : context.moveTo(x, y(value)),
  );
  context.stroke();
  context.fillStyle = palette.rule;
  context.fillRect(0, bottom, view.width, 1);
}

/** Steps of the curve as points of a line: all of them, or the highest of each px. */
function highest(view, at, nbytes) {
  const first = Math.max(firstAbove(at, view.from, 0, at.length) - 1, 0);
  const last = Math.min(firstAbove(at, view.to, 0, at.length) + 1, at.length);
  const points = [];
  if (last - first < view.width) {
    for (let i = first; i < last; i += 1) {
      if (i > first) points.push([view.x(at[i]), nbytes[i - 1]]);
      points.push([view.x(at[i]), nbytes[i]]);
    }
    return points;
  }
  const { from, scale } = view;
  let pixel = Math.floor((at[first] - from) * scale);
  let most = nbytes[first];
  for (let i = first; i < last; i += 1) {
    const here = Math.floor((at[i] - from) * scale);
    if (here !== pixel) {
      points.push([pixel, most], [here, most]);
      pixel = here;
      most = nbytes[i - 1];
    }
    if (nbytes[i] > most) most = nbytes[i];
  }
  points.push([pixel, most]);
  return points;
}

/** Limits across the curve, and their names; drawn last, so that no other line crosses a name. */
function drawLimits(context, view, track, row, most, palette) {
  for (const line of track.limits) {
    const isShown = line.nbytes <= most;
    const at = isShown ? Math.round(row.top + row.height * (1 - line.nbytes / most)) : row.top;
    if (isShown) {
      context.strokeStyle = palette.exposed;
      context.lineWidth = 1;
      context.setLineDash([5, 4]);
      context.beginPath();
      context.moveTo(0, at + 0.5);
      context.lineTo(view.width, at + 0.5);
      context.stroke();
      context.setLineDash([]);
    }
    const text = `${line.name} ${formatBytes(line.nbytes)}${isShown ? "" : " ↑"}`;
    const width = context.measureText(text).width;
    const middle = at < row.top + 16 ? at + 10 : at - 8;
    context.fillStyle = palette.paper;
    context.globalAlpha = 0.9;
    context.fillRect(view.width - width - 10, middle - 7, width + 10, 14);
    context.globalAlpha = 1;
    context.fillStyle = palette.soft;
    context.fillText(text, view.width - width - 5, middle + 0.5);
  }
}

/** Live bytes at a time. */
function memoryAt(track, ns) {
  const { at, nbytes } = track.memory;
  return nbytes[Math.max(firstAbove(at, ns, 0, at.length) - 1, 0)];
}
