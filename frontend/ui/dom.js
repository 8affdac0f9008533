// Makes elements and texts. All text goes through `textContent`, so whatever a request or a worker
// is called, it is shown and never run.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** An HTML element. Attributes `onclick` and alike take functions. Children: elements or texts. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A bar that is filled to `share`, 0 to 1. */
export function bar(share, kind = "bar") {
  const inner = h("i");
  inner.style.width = `${Math.round(100 * Math.min(1, Math.max(0, share)))}%`;
  return h("span", { class: kind, "aria-hidden": "true" }, inner);
}

/** Milliseconds for people. "–": unknown. */
export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  return seconds(value / 1000);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 90) return `${Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)} k`;
  return value >= 10 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`;
}

/** A time of day. at: seconds since 1970. */
export function clock(at) {
  const options = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
  return new Date(at * 1000).toLocaleTimeString([], options);
}

/** The end of a long id, which differs where its beginning does not. */
export function short(id, length = 14) {
  return id.length > length ? `…${id.slice(1 - length)}` : id;
}

export const STAGES = {
  route: "At the frontend", prompt: "Decode worker", queue: "Queue", prefill: "Prefill worker", kv: "KV on the way",
  decode: "Answer",
};

/** A line for each server that does not answer. Pure. */
export function outages(snapshot) {
  const workers = (snapshot.workers ?? []).length > 0;
  // Of a server that nobody asks, it is not known since when it does not answer. Stock servers alone need no NATS.
  return Object.entries(snapshot.servers ?? {}).filter(([, server]) => !server.up && (workers || server.since_s > 0)).map(([name, server]) => {
    const who = name === "nats" ? "NATS" : name;
    return server.since_s > 0 ? `${who} unreachable for ${seconds(server.since_s)}: ${server.error}` : `${who} ${server.error}`;
  });
}
