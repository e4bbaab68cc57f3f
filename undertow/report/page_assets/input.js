// Pointer, wheel and keys.

const CLICK_PX = 4; // a pointer that moved less has clicked
const KEY_PAN = 0.15; // of what is seen
const KEY_ZOOM = 0.6;

function offset(event, canvas) {
  const box = canvas.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
}

function startPointer(app, trackView) {
  const { canvas } = trackView;
  const fingers = new Map();
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    const point = offset(event, canvas);
    fingers.set(event.pointerId, point);
    drag = {
      ...point,
      from: app.view.goal[0],
      to: app.view.goal[1],
      moved: false,
      range: event.shiftKey,
      apart: spread(fingers),
    };
    app.chart.focus({ preventScroll: true });
    event.preventDefault();
  });
  canvas.addEventListener("pointermove", (event) => {
    const point = offset(event, canvas);
    if (!fingers.has(event.pointerId) || !drag) {
      app.setHover(trackView.hit(point.x, point.y), { x: event.pageX, y: event.pageY }, canvas);
      return;
    }
    fingers.set(event.pointerId, point);
    const span = drag.to - drag.from;
    if (fingers.size === 2) {
      drag.moved = true;
      const factor = drag.apart / Math.max(spread(fingers), 1);
      const middle = drag.from + (drag.x / app.view.width) * span;
      app.view.show(middle - (middle - drag.from) * factor, middle + (drag.to - middle) * factor);
      return;
    }
    if (!drag.moved && Math.abs(point.x - drag.x) < CLICK_PX) return;
    drag.moved = true;
    app.setHover(null);
    canvas.classList.add("dragging");
    if (drag.range) {
      app.range = [app.view.at(drag.x), app.view.at(point.x)];
      app.invalidate();
    } else {
      const shift = ((drag.x - point.x) / app.view.width) * span;
      app.view.show(drag.from + shift, drag.to + shift);
    }
  });
  const finish = (event) => {
    if (!fingers.delete(event.pointerId) || !drag) return;
    canvas.classList.remove("dragging");
    if (!drag.moved && event.type === "pointerup") {
      const point = offset(event, canvas);
      const target = trackView.hit(point.x, point.y);
      if (target && target.row >= 0) app.select(target);
      else app.deselect();
    }
    if (app.range) app.view.show(Math.min(...app.range), Math.max(...app.range), { smooth: true });
    app.range = null;
    if (!fingers.size) drag = null;
    app.invalidate();
  };
  canvas.addEventListener("pointerup", finish);
  canvas.addEventListener("pointercancel", finish);
  canvas.addEventListener("pointerleave", () => app.setHover(null));
  canvas.addEventListener("dblclick", (event) => {
    const { x, y } = offset(event, canvas);
    const target = trackView.hit(x, y);
    if (target && target.row >= 0) app.select(target, { close: true });
    else app.view.zoom(0.4, app.view.at(x), { smooth: true });
  });
}

function spread(fingers) {
  const points = [...fingers.values()];
  return points.length === 2 ? Math.abs(points[0].x - points[1].x) : 0;
}

function startOverviewPointer(app) {
  const { overview, view } = app;
  const centre = (event) => {
    const [from, to] = view.goal;
    const at = overview.at(offset(event, overview.canvas).x);
    view.show(at - (to - from) / 2, at + (to - from) / 2);
  };
  overview.canvas.addEventListener("pointerdown", (event) => {
    overview.canvas.setPointerCapture(event.pointerId);
    centre(event);
  });
  overview.canvas.addEventListener("pointermove", (event) => {
    if (event.buttons & 1) centre(event);
  });
  // Drawing a range on the axis zooms to it.
  const { axis } = overview;
  axis.addEventListener("pointerdown", (event) => {
    axis.setPointerCapture(event.pointerId);
    const at = view.at(offset(event, axis).x);
    app.range = [at, at];
  });
  axis.addEventListener("pointermove", (event) => {
    if (!app.range || !(event.buttons & 1)) return;
    app.range = [app.range[0], view.at(offset(event, axis).x)];
    app.invalidate();
  });
  axis.addEventListener("pointerup", () => {
    if (app.range && Math.abs(app.range[1] - app.range[0]) * view.scale > CLICK_PX) {
      view.show(Math.min(...app.range), Math.max(...app.range), { smooth: true });
    }
    app.range = null;
    app.invalidate();
  });
}

function startWheel(app) {
  app.chart.addEventListener(
    "wheel",
    (event) => {
      const { view } = app;
      const unit = event.deltaMode === 1 ? 16 : 1; // lines or px
      const isZoom = event.ctrlKey || event.metaKey || event.altKey;
      const sideways = event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX;
      if (isZoom) {
        const { x } = offset(event, app.overview.axis);
        const factor = Math.exp(Math.min(Math.max(event.deltaY * unit, -120), 120) * 0.0035);
        view.zoom(factor, view.at(x));
      } else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
        view.pan((sideways * unit) / view.scale);
      } else {
        return; // the page scrolls
      }
      event.preventDefault();
    },
    { passive: false },
  );
}

function startKeys(app) {
  app.chart.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("button")) return;
    if (chartKey(app, event)) event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.target instanceof HTMLInputElement || event.ctrlKey || event.metaKey || event.altKey)
      return;
    if (event.key === "/") {
      app.search.input.focus();
      app.search.input.select();
    } else if (event.key === "?") {
      document.getElementById("help").click();
    } else if (event.key === "Escape" && app.selected) {
      app.deselect();
      app.chart.focus();
    } else {
      return;
    }
    event.preventDefault();
  });
}

/** Whether the key meant something. */
function chartKey(app, event) {
  const { view, selected } = app;
  const span = view.goal[1] - view.goal[0];
  const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const lane = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (side && selected && !event.shiftKey) app.stepInLane(side);
  else if (side) view.pan(side * span * KEY_PAN, { smooth: true });
  else if (lane && selected) app.stepLane(lane);
  else if (event.key === "+" || event.key === "=") view.zoomAtCentre(KEY_ZOOM);
  else if (event.key === "-" || event.key === "_") view.zoomAtCentre(1 / KEY_ZOOM);
  else if (event.key === "0") view.whole();
  else if (event.key === "Home") view.show(view.low, view.low + span, { smooth: true });
  else if (event.key === "End") view.show(view.high - span, view.high, { smooth: true });
  else if (event.key.toLowerCase() === "e") app.stepExposed(event.shiftKey ? -1 : 1);
  else if (event.key.toLowerCase() === "z" && selected) app.select(selected, { close: true });
  else if (event.key === "Enter" || event.key === " ") app.enter();
  else if (event.key === "Escape" && app.match) app.search.clear();
  else return false;
  return !(event.key === "Escape" && selected);
}

function startButtons(app) {
  const on = (id, act) => document.getElementById(id).addEventListener("click", act);
  on("zoom-in", () => app.view.zoomAtCentre(KEY_ZOOM));
  on("zoom-out", () => app.view.zoomAtCentre(1 / KEY_ZOOM));
  on("fit", () => app.view.whole());
  on("next-exposed", () => app.stepExposed(1));
  on("help", (event) => {
    const keys = document.getElementById("keys");
    keys.hidden = !keys.hidden;
    event.currentTarget.setAttribute("aria-expanded", String(!keys.hidden));
  });
}
