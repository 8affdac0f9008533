// The stages of one request on a time axis, predicted beside actual.

import { h, ms, s } from "./dom.js";

const ROW = 22;
const LEFT = 128;
const RIGHT = 70;
const [LEAST, MOST] = [300, 800];

const KIND = {
  route: "route", fetch: "kv", queue: "queue", claim: "queue", prefix_read: "kv", prefill: "prefill", kv_write: "kv",
  tail: "kv", commit: "decode", rest: "prompt",
};
const NAMES = {
  route: "frontend", fetch: "fetch of a prefix", queue: "queue", claim: "claim", prefix_read: "read of the prefix",
  prefill: "prefill", kv_write: "KV written", tail: "last of the KV", commit: "commit", rest: "decode worker",
};

/**
 * Where each stage lies: [{name, start, ms, expected}], milliseconds since the request came. Pure.
 *
 * What a record tells are lengths. The claim is the end of the wait in the queue, and KV is written
 * from the first chunk on until the prefill's tail is over.
 */
export function stagesOf(record) {
  const told = record.timings_ms ?? {};
  const expected = record.expected_s ?? {};
  const found = [];
  const add = (name, start, wanted) => {
    const length = told[name];
    if (length === null || length === undefined) return start;
    found.push({ name, start: Math.max(0, start), ms: length, expected: wanted ? wanted * 1000 : null });
    return start + length;
  };
  let at = add("route", 0);
  at = add("fetch", at);
  const queued = add("queue", at, expected.queue);
  add("claim", queued - (told.claim ?? 0));
  const read = add("prefix_read", queued);
  const computed = add("prefill", read, expected.prefill);
  const written = computed + (told.tail ?? 0);
  add("kv_write", Math.max(read, written - (told.kv_write ?? 0)), expected.kv_write);
  add("tail", computed);
  const end = add("commit", written);
  const first = told.first_token;
  if (first !== null && first !== undefined && first > end) found.push({ name: "rest", start: end, ms: first - end, expected: null });
  return found;
}

/** The time to first token that was predicted for the choice that was made. null: none was. Pure. */
export function predictedOf(record) {
  const predicted = record.predicted_ms ?? {};
  return predicted[record.choice ?? record.path] ?? null;
}

/** room: pixels in a line. Where there are fewer than MOST, the bars get shorter, not the letters smaller. */
export function waterfall(record, room) {
  const width = Math.min(MOST, Math.max(LEAST, room));
  const stages = stagesOf(record);
  const first = record.timings_ms?.first_token ?? null;
  const end = Math.max(1, first ?? 0, ...stages.map((stage) => stage.start + Math.max(stage.ms, stage.expected ?? 0)));
  const x = (value) => LEFT + ((width - LEFT - RIGHT) * value) / end;
  const height = ROW * (stages.length + 1) + 18;
  const rows = stages.flatMap(({ name, start, ms: length, expected }, index) => {
    const y = index * ROW;
    const parts = [
      s("text", { x: LEFT - 8, y: y + 15, "text-anchor": "end" }, NAMES[name]),
      s("rect", { class: `actual s-${KIND[name]}`, x: x(start), y: y + 4, width: Math.max(1.5, x(start + length) - x(start)), height: 13, rx: 2 }),
    ];
    if (expected) parts.push(s("rect", { class: "expected", x: x(start), y: y + 3, width: x(start + expected) - x(start), height: 15, rx: 2 }));
    const after = Math.max(x(start + length), expected ? x(start + expected) : 0) + 6;
    const inside = after > width - RIGHT + 4;
    parts.push(s("text", { class: "axis", x: inside ? width : after, y: y + 15, "text-anchor": inside ? "end" : "start" }, ms(length)));
    return parts;
  });
  const bottom = ROW * stages.length + 4;
  for (const share of [0, 0.5, 1]) {
    const at = x(end * share);
    rows.unshift(s("line", { class: "grid", x1: at, x2: at, y1: 0, y2: bottom }));
    rows.push(s("text", { class: "axis", x: at, y: bottom + 16, "text-anchor": "middle" }, ms(end * share)));
  }
  const label = stages.map((stage) => `${NAMES[stage.name]} ${ms(stage.ms)}`).join(", ");
  return s("svg", { class: "fall", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...rows);
}

/** Predicted beside actual, in words: [[what, predicted, actual]]. Pure. */
export function comparison(record) {
  const told = record.timings_ms ?? {};
  const expected = record.expected_s ?? {};
  const whole = (value) => (value === null || value === undefined ? null : value * 1000);
  const rows = [
    ["queue", whole(expected.queue), told.queue],
    ["prefill", whole(expected.prefill), told.prefill],
    ["KV written", whole(expected.kv_write), told.kv_write],
    ["first token after the decision", predictedOf(record), record.outcome_ms],
  ];
  return rows.filter(([, predicted]) => predicted !== null && predicted !== undefined);
}

export function comparisonTable(record) {
  const rows = comparison(record);
  if (rows.length === 0) return null;
  const cells = rows.map(([what, predicted, actual]) =>
    h("tr", {}, h("td", {}, what), h("td", { class: "n" }, ms(predicted)), h("td", { class: "n" }, ms(actual))));
  const head = h("tr", {}, h("th", {}, "stage"), h("th", { class: "n" }, "predicted"), h("th", { class: "n" }, "actual"));
  return h("table", {}, h("thead", {}, head), h("tbody", {}, cells));
}
