// The dialog: one request with its waterfall, or one worker.

import { count, h, ms, percent, seconds, STAGES } from "./dom.js";
import { state } from "./tables.js";
import { comparisonTable, waterfall } from "./waterfall.js";

function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", {}, known.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

export class Detail {
  /** page: has `snapshot` and `ended`. */
  constructor(dialog, page) {
    this.dialog = dialog;
    this.page = page;
    this.update = null;
    dialog.addEventListener("close", () => this.clear());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }

  clear() {
    this.update = null;
  }

  /** Called with each snapshot. */
  refresh() {
    this.update?.();
  }

  open(title, ...parts) {
    this.clear();
    const close = h("button", { type: "button", onclick: () => this.dialog.close(), autofocus: true }, "Close");
    this.dialog.replaceChildren(h("header", {}, h("h2", { id: "detail-title" }, title), close), ...parts);
    if (!this.dialog.open) this.dialog.showModal();
  }

  // ------------------------------------------------------------------ a request

  request(id) {
    const body = h("div");
    this.open(`Request ${id}`, body);
    let asked = false;
    this.update = () => {
      const flow = (this.page.snapshot?.flows ?? []).find((one) => one.id === id);
      if (flow !== undefined) {
        body.replaceChildren(underWay(flow, this.page.snapshot.frontend));
      } else if (!asked) {
        asked = true;
        this.ask(id, body);
      }
    };
    this.update();
  }

  async ask(id, body) {
    const row = this.page.ended.find((one) => one.id === id);
    try {
      const answer = await fetch(`ui/requests/${encodeURIComponent(id)}`);
      if (answer.ok) body.replaceChildren(...record(await answer.json(), row, body.clientWidth));
      else body.replaceChildren(h("p", { class: "warn" }, await why(answer)));
    } catch (error) {
      body.replaceChildren(h("p", { class: "bad" }, `No answer: ${error.message}`));
    }
  }

  // ------------------------------------------------------------------ a worker

  worker(id) {
    const [about, load] = [h("div"), h("div")];
    this.open(`Worker ${id}`, about, h("details", {}, h("summary", {}, "All it tells of its load"), load));
    this.update = () => {
      const { snapshot } = this.page;
      const row = (snapshot.workers ?? []).find((one) => one.instance_id === id);
      about.replaceChildren(...aboutWorker(row));
      load.replaceChildren(facts(Object.entries(row?.load ?? {}).filter(([, value]) => typeof value !== "object").map(([name, value]) => [name, typeof value === "number" ? count(value) : value])));
    };
    this.update();
  }
}

async function why(answer) {
  try {
    const { error } = await answer.json();
    return error.message ?? String(error);
  } catch {
    return `The answer is ${answer.status}.`;
  }
}

function underWay(flow, frontend) {
  return facts([
    ["stage", `${STAGES[flow.stage]}, for ${seconds(flow.stage_s)}`],
    ["since it came", seconds(flow.age_s)],
    ["prompt", `${count(flow.tokens ?? 0)} tokens`],
    ["answer", flow.made ? `${count(flow.made)} tokens so far` : null],
    ["done", flow.done === undefined ? null : percent(flow.done)],
    ["in the queue", flow.queue_s === undefined ? null : seconds(flow.queue_s)],
    ["prefill", flow.prefill_s === undefined ? null : seconds(flow.prefill_s)],
    ["attempt", flow.attempt || null],
    ["decode worker", flow.decode], ["prefill worker", flow.prefill],
    ["frontend", flow.own === false && frontend ? "another one" : null],
  ]);
}

function record(told, row, room) {
  const unknown = told.reason ? "its remote prefill has not ended" : "its decode worker has not told";
  const path = told.path === "none" ? "sent to no decode worker" : told.path === "unknown" ? unknown
    : told.path === "remote" ? "prefilled by a prefill worker" : told.fallback
    ? `sent to be prefilled remotely, then done locally: ${told.fallback}` : "prefilled by the decode worker itself";
  const predicted = told.predicted_ms ?? {};
  const choices = [["remote", predicted.remote], ["local", predicted.local]];
  const said = choices.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => `${name} ${ms(value)}`).join(", ");
  const here = (told.prefix_hit_tokens ?? 0) + (told.fetched_tokens ?? 0);
  const local = Math.max(0, told.prompt_tokens - here - told.remote_tokens);
  const fetched = told.fetched_tokens ? ` + ${told.fetched_tokens} fetched` : "";
  const choice = told.decode_choice;
  return [
    facts([
      ["error", told.error ?? null],
      ["what happened", told.reason ? `${path} (reason: ${told.reason})` : path],
      ["prompt", `${told.prompt_tokens} tokens = ${told.prefix_hit_tokens} cached${fetched} + ${told.remote_tokens} remotely + ${local} locally`],
      ["answer", row ? `${row.made ?? 0} tokens in ${ms(row.total_ms)}, ${ms(row.itl_ms)} between two` : null],
      ["decode worker", choice ? `${told.decode_instance} (${choice.policy}: ${choice.reason}, ${choice.matched_tokens} tokens known there)` : told.decode_instance],
      ["prefill worker", told.prefill_instance ? `${told.prefill_instance} (attempts: ${told.attempts})` : null],
      ["KV written", told.kv_bytes ? `${count(told.kv_bytes)} bytes${told.transport ? ` over ${told.transport}` : ""}` : null],
      ["not over", (told.why_not_better ?? []).join("; ")],
      ["continued after", (told.migrated_from ?? []).join(", ")],
      ["at that time", told.outage],
      ["predicted", said],
    ]),
    h("h3", {}, "From its arrival to its first token"),
    waterfall(told, room),
    told.expected_s ? h("p", { class: "hint" }, "Dashed: what was expected when it was decided.") : null,
    comparisonTable(told),
  ].filter((part) => part !== null);
}

function aboutWorker(row) {
  if (row === undefined) return [h("p", { class: "warn" }, "This worker has left.")];
  return [
    ...(row.troubles ?? []).map((line) => h("p", { class: "warn" }, `⚠ ${line}`)),
    facts([
      ["role", row.role], ["state", state(row.state)], ["model", row.model], ["host", `${row.host}, pid ${row.pid}`],
      ["restarts", String(row.restarts ?? 0)],
      ["pressure", row.pressure === null ? null : `${percent(row.pressure)} full`],
      ["its jobs in the queue", row.backlog_s === null ? null : `${seconds(row.backlog_s)} of work`],
    ]),
  ];
}
