// Line charts over time, in SVG. One cursor for all of them: a mouse or the arrow keys move it.
//
// A chart has lines; each takes one value out of a point. Functions without `draw` are pure.

import { clock, h, s, SIGNS } from "./dom.js";

export const WINDOW_S = 900;
const HEIGHT = 150;
const LEFT = 46;
const RIGHT = 8;
const TOP = 14;
const BOTTOM = 18;
const GAP_S = 11;

/** The values of a line: [seconds since 1970, value or null], in order of time. */
export function series(points, pick) {
  return points.map((point) => {
    const value = pick(point);
    return [point.at + (point.seconds ?? 5) / 2, value === undefined || Number.isNaN(value) ? null : value];
  });
}

/** Runs of neighbours that a line connects. A null, or a gap in time, breaks it. */
export function runs(values) {
  const found = [];
  let run = [];
  for (const [at, value] of values) {
    const broken = value === null || (run.length > 0 && at - run[run.length - 1][0] > GAP_S);
    if (broken && run.length > 0) {
      found.push(run);
      run = [];
    }
    if (value !== null) run.push([at, value]);
  }
  if (run.length > 0) found.push(run);
  return found;
}

/** The top of the axis: the least of 1, 2, 5 times a power of ten that is not below `highest`. */
export function ceiling(highest) {
  if (!(highest > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(highest));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= highest * 0.999);
}

/** The point that covers a time, or the last one before it. */
export function pointAt(points, at) {
  let found = null;
  for (const point of points) if (point.at <= at) found = point;
  return found !== null && at - found.at < 2 * GAP_S ? found : null;
}

const charts = new Set();
let cursor = null;

function moveCursor(at) {
  cursor = at;
  for (const chart of charts) if (chart.element.isConnected) chart.draw();
}

/**
 * One chart. lines: [{name, pick, colour, dash, area}]. format: of values. top: least top of the
 * axis. target: returns a value to draw as a dotted line, or null.
 */
export class Chart {
  constructor({ title, lines, format, top = 0, target = () => null, note = "" }) {
    Object.assign(this, { title, lines, format, top, target, note });
    this.legend = h("span", { class: "legend" });
    this.svg = s("svg", { role: "img", tabindex: "0" });
    this.element = h("figure", { class: "card chart" }, h("h3", {}, h("span", { title: note }, title), this.legend), this.svg);
    this.points = [];
    this.marks = [];
    this.now = 0;
    this.svg.addEventListener("pointermove", (event) => moveCursor(this.timeAt(event.offsetX)));
    this.svg.addEventListener("pointerleave", () => moveCursor(null));
    this.svg.addEventListener("blur", () => moveCursor(null));
    this.svg.addEventListener("keydown", (event) => this.onKey(event));
    charts.add(this);
  }

  drop() {
    charts.delete(this);
  }

  onKey(event) {
    const steps = { ArrowLeft: -5, ArrowRight: 5, PageUp: -60, PageDown: 60 };
    if (event.key === "Home") moveCursor(this.now - WINDOW_S);
    else if (event.key === "End") moveCursor(this.now);
    else if (event.key === "Escape" && cursor !== null) moveCursor(null);
    else if (event.key in steps) {
      const at = (cursor ?? this.now) + steps[event.key];
      moveCursor(Math.min(this.now, Math.max(this.now - WINDOW_S, at)));
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  show(points, marks, now) {
    Object.assign(this, { points, marks, now });
    this.draw();
  }

  timeAt(x) {
    const width = this.svg.clientWidth - LEFT - RIGHT;
    return this.now - WINDOW_S + (WINDOW_S * Math.min(width, Math.max(0, x - LEFT))) / width;
  }

  draw() {
    const width = this.svg.clientWidth || 320;
    const x = (at) => LEFT + ((width - LEFT - RIGHT) * (at - this.now + WINDOW_S)) / WINDOW_S;
    const values = this.lines.map((line) => series(this.points, line.pick));
    const target = this.target();
    const highest = Math.max(this.top, ...values.flat().map(([, value]) => value ?? 0));
    const top = ceiling(target !== null && target < 2 * highest ? Math.max(highest, target) : highest);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(
      ...this.drawGrid(width, x, y, top),
      ...this.drawMarks(x),
      ...this.lines.flatMap((line, index) => drawLine(line, values[index], x, y)),
    );
    if (target !== null && target <= top) {
      this.svg.append(s("line", { class: "target", x1: LEFT, x2: width - RIGHT, y1: y(target), y2: y(target) }));
    }
    this.drawLegend(x);
  }

  drawGrid(width, x, y, top) {
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const at = y(top * share);
      parts.push(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      parts.push(s("text", { class: "axis", x: LEFT - 5, y: at + 4, "text-anchor": "end" }, this.format(top * share)));
    }
    for (const ago of [900, 600, 300, 0]) {
      const anchor = ago === 900 ? "start" : ago === 0 ? "end" : "middle";
      const label = clock(this.now - ago, false);
      parts.push(s("text", { class: "axis", x: x(this.now - ago), y: HEIGHT - 4, "text-anchor": anchor }, label));
    }
    return parts;
  }

  drawMarks(x) {
    return this.marks.flatMap((mark) => {
      const from = Math.max(LEFT, x(mark.at));
      const to = x(mark.until ?? (["outage", "lost", "drain"].includes(mark.kind) ? this.now : mark.at));
      if (to < LEFT) return [];
      const box = { class: `m-${mark.kind}`, y: TOP, height: HEIGHT - TOP - BOTTOM };
      const sign = (SIGNS[mark.kind] ?? ["•"])[0];
      return [
        s("rect", { ...box, x: from, width: Math.max(1, to - from), "stroke-width": 0.6 }),
        s("text", { class: "sign", x: from, y: TOP - 3, "text-anchor": "middle" }, sign),
      ];
    });
  }

  drawLegend(x) {
    const at = cursor === null ? null : Math.max(cursor, this.now - WINDOW_S);
    const point = at === null ? this.points[this.points.length - 1] : pointAt(this.points, at);
    const values = this.lines.map((line) => (point ? line.pick(point) : null));
    const said = this.lines.map((line, index) => `${line.name} ${this.format(values[index])}`);
    const parts = this.lines.map((line, index) => h("span", { class: `c-${line.colour}${line.dash ? " dash" : ""}` }, said[index]));
    if (at !== null) {
      const when = clock(at);
      parts.unshift(when);
      this.svg.append(s("line", { class: "cursor", x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.legend.replaceChildren(...parts);
    this.svg.setAttribute("aria-label", `${this.title}${at === null ? "" : ` at ${clock(at)}`}: ${said.join(", ")}`);
  }
}

function drawLine(line, values, x, y) {
  return runs(values).flatMap((run) => {
    const kind = `c-${line.colour}`;
    if (run.length === 1) return [s("circle", { class: `dot ${kind}`, cx: x(run[0][0]), cy: y(run[0][1]), r: 2 })];
    const path = run.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join("L");
    const parts = [s("path", { class: `line ${kind}${line.dash ? " dash" : ""}`, d: `M${path}` })];
    if (line.area) {
      const [first, last] = [run[0][0], run[run.length - 1][0]];
      parts.unshift(s("path", { class: `area ${kind}`, d: `M${x(first).toFixed(1)},${y(0)}L${path}L${x(last).toFixed(1)},${y(0)}Z` }));
    }
    return parts;
  });
}

/** A line without axes, for a table. top: the value at its upper edge. */
export function spark(points, pick, now, top) {
  const x = (at) => (90 * (at - now + WINDOW_S)) / WINDOW_S;
  const y = (value) => 19 - 18 * Math.min(1, value / top);
  const line = { colour: "blue", area: true };
  return s("svg", { class: "spark", viewBox: "0 0 90 20", "aria-hidden": "true" }, ...drawLine(line, series(points, pick), x, y));
}
