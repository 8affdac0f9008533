// The tables and figures: each function returns elements for what the page knows.

import { bar, clock, count, h, ms, percent, seconds, short } from "./dom.js";

const ROWS = 25;
const STATES = { ready: ["●", "good"], draining: ["◆", "warn"], lost: ["✕", "bad"] };

export function figures(snapshot) {
  const now = snapshot.now ?? {};
  const [ttft, itl] = snapshot.targets_ms ?? [];
  const pair = (values) => (values ? `${ms(values[0])} / ${ms(values[1])}` : "–");
  const done = now.done_per_s ?? 0;
  const queue = snapshot.queue;
  const parts = [
    [pair(now.ttft_ms), "TTFT, median / p95", `target ${ms(ttft)}`],
    [pair(now.itl_ms), "ITL, median / p95", `target ${ms(itl)}; mean of each answer`],
    [count(now.tokens_per_s ?? 0), "tokens/s", "of answers"],
    [done > 0 ? percent((now.good_per_s ?? 0) / done) : "–", "goodput", "requests within both targets, last minute"],
    [count(done), "requests/s", "that ended, last minute"],
    [String(now.in_flight ?? 0), "under way", snapshot.frontend ? "requests of this frontend" : "requests at decode workers"],
    [seconds(now.backlog_s), "queue", queue ? `${queue.depth_jobs} jobs, ${count(queue.depth_tokens)} tokens` : "unknown"],
  ];
  if (now.failed) parts.push([count(now.failed), "failed", "since the frontend started"]);
  return parts.map(([value, name, more]) => h("div", { class: "figure", title: more }, h("b", {}, value), h("span", {}, name)));
}

function head(...names) {
  return h("thead", {}, h("tr", {}, names.map(([name, kind]) => h("th", { class: kind, scope: "col" }, name))));
}

export function state(name) {
  const [sign, kind] = STATES[name] ?? ["•", ""];
  return h("span", { class: `${kind} nowrap` }, `${sign} ${name}`);
}

export function workers(snapshot, open) {
  const rows = (snapshot.workers ?? []).map((row) => {
    const trouble = (row.troubles ?? []).join("; ");
    const kv = row.kv === null ? "–" : [bar(row.kv, row.kv > 0.9 ? "meter high" : "meter"), percent(row.kv)];
    return h("tr", {},
      h("td", {}, h("button", { type: "button", class: "link", onclick: () => open(row.instance_id) }, row.instance_id)),
      h("td", {}, row.role),
      h("td", { title: trouble }, state(row.state), trouble ? h("span", { class: "warn" }, " ⚠") : null),
      h("td", { class: "nowrap" }, kv),
      h("td", { class: "n" }, count(row.running)),
      h("td", { class: "n" }, count(row.waiting)),
      h("td", { class: "n" }, count(row.tokens_per_s)),
      h("td", { class: "n wide" }, String(row.restarts ?? 0)));
  });
  if (rows.length === 0) return [h("p", { class: "muted" }, "No worker is known.")];
  return [h("table", {}, head(["worker"], ["role"], ["state"], ["KV use"], ["running", "n"], ["waiting", "n"], ["tokens/s", "n"],
    ["restarts", "n wide"]), h("tbody", {}, rows))];
}

/** How often each decision was made: [[path, reason, count]], the most frequent first. Pure. */
export function decisionsOf(ended) {
  const counts = new Map();
  for (const row of ended.filter((one) => one.at && one.path !== "failed")) {
    const key = `${row.path} ${row.reason}`;
    counts.set(key, (counts.get(key) ?? 0) + 1);
  }
  return [...counts].map(([key, number]) => [...key.split(" ", 2), number]).sort((a, b) => b[2] - a[2]);
}

export function decisions(ended) {
  const rows = decisionsOf(ended);
  if (rows.length === 0) return [h("p", { class: "muted" }, "No request has ended yet.")];
  const all = rows.reduce((sum, [, , number]) => sum + number, 0);
  const most = rows[0][2];
  const parts = rows.flatMap(([path, reason, number]) => {
    const share = bar(number / most);
    share.classList.add(path === "remote" ? "s-prefill" : "s-prompt");
    return [h("span", {}, `${path === "remote" ? "→" : "⌂"} ${path}: ${reason}`), share, h("span", { class: "n nowrap" }, `${number} (${percent(number / all)})`)];
  });
  return [h("div", { class: "why" }, parts)];
}

/** The stages of a request as one small bar. */
export function stack(row) {
  const stages = row.stages ?? {};
  const parts = [["queue", "queue"], ["prefix_read", "kv"], ["prefill", "prefill"], ["tail", "kv"]].filter(([name]) => stages[name] > 0);
  const known = parts.reduce((sum, [name]) => sum + stages[name], 0);
  const all = Math.max(known, row.ttft_ms ?? 0);
  if (all === 0) return h("span");
  const widths = parts.map(([name, kind]) => [kind, stages[name], `${name} ${ms(stages[name])}`]);
  if (all > known) widths.push(["prompt", all - known, `decode worker ${ms(all - known)}`]);
  const box = h("span", { class: "stack", title: widths.map(([, , title]) => title).join(", ") });
  for (const [kind, value] of widths) {
    const piece = h("i", { class: `s-${kind}` });
    piece.style.width = `${(100 * value) / all}%`;
    box.append(piece);
  }
  return box;
}

export function ended(rows, open) {
  if (rows.length === 0) return [h("p", { class: "muted" }, "No request has ended yet.")];
  const latest = [...rows].reverse().slice(0, ROWS);
  const cells = latest.map((row) => h("tr", {},
    h("td", { class: "nowrap" }, row.at ? clock(row.at) : "cancelled"),
    h("td", {}, h("button", { type: "button", class: "link", title: row.id, onclick: () => open(row.id) }, short(row.id, 20))),
    h("td", { class: "nowrap" }, row.path === "failed" ? h("span", { class: "bad" }, "✕ failed") : row.path === "remote" ? "→ remote" : "⌂ local", row.fallback ? h("span", { class: "warn", title: row.fallback }, " ⚠") : null),
    h("td", { class: "wide" }, row.fallback ?? row.reason),
    h("td", { class: "n" }, count(row.prompt ?? 0)),
    h("td", { class: "n" }, count(row.made ?? 0)),
    h("td", { class: "n nowrap" }, ms(row.ttft_ms)),
    h("td", { class: "n nowrap wide" }, ms(row.predicted_ms)),
    h("td", { class: "n nowrap" }, ms(row.itl_ms)),
    h("td", {}, row.good === undefined || row.good === null ? "" : row.good ? h("span", { class: "good" }, "✓ yes") : h("span", { class: "bad" }, "✕ no")),
    h("td", { class: "wide" }, stack(row))));
  return [h("table", {}, head(["ended"], ["request"], ["prefill"], ["reason", "wide"], ["prompt", "n"], ["answer", "n"], ["TTFT", "n"],
    ["predicted", "n wide"], ["ITL", "n"], ["in target"], ["stages", "wide"]), h("tbody", {}, cells))];
}
