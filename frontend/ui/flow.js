// The lanes: each request under way is a chip in the lane of its stage.

import { bar, count, h, ms, seconds, short, STAGES } from "./dom.js";

const LANES = [
  ["prompt", ["route", "prompt"], "decides where the prompt is computed, or computes it"],
  ["queue", ["queue"], "waits for a prefill worker to pull it"],
  ["prefill", ["prefill"], "computes the prompt, and writes KV as it goes"],
  ["kv", ["kv"], "the last KV comes, and is committed"],
  ["decode", ["decode"], "tokens go out"],
];
const SHOWN = 6;
const MINUTE_S = 60;

/** Chips of each lane: [[lane, stages, hint, flows]]. Pure. */
export function lanesOf(flows) {
  return LANES.map(([lane, stages, hint]) => [lane, stages, hint, flows.filter((flow) => stages.includes(flow.stage))]);
}

/** The median milliseconds that requests of the last minute were in a lane. null: none was. Pure. */
export function medianIn(lane, ended, now) {
  const pick = {
    queue: (row) => row.stages?.queue,
    prefill: (row) => row.stages?.prefill,
    kv: (row) => row.stages?.tail,
    decode: (row) => (row.total_ms === undefined || row.ttft_ms === undefined ? undefined : row.total_ms - row.ttft_ms),
    prompt: (row) => (row.path === "local" ? row.ttft_ms : undefined),
  }[lane];
  const values = ended.filter((row) => row.at && row.at > now - MINUTE_S).map(pick).filter((v) => v !== undefined && v !== null);
  values.sort((a, b) => a - b);
  return values.length === 0 ? null : { median: values[(values.length - 1) >> 1], of: values.length };
}

export class Flow {
  constructor(element, open) {
    this.element = element;
    this.open = open;
    this.lanes = new Map();
    this.chips = new Map();
    for (const [lane, , hint] of LANES) {
      const parts = { number: h("span"), note: h("p"), list: h("ul") };
      this.lanes.set(lane, parts);
      const title = h("h3", { title: hint }, STAGES[lane], parts.number);
      element.append(h("div", { class: `lane s-${lane}`, "data-lane": lane }, title, parts.note, parts.list));
    }
  }

  show(snapshot, ended) {
    const before = new Map([...this.chips].map(([id, chip]) => [id, [chip.stage, chip.item.getBoundingClientRect()]]));
    const shown = new Set();
    for (const [lane, , , flows] of lanesOf(snapshot.flows ?? [])) {
      const { number, note, list } = this.lanes.get(lane);
      number.textContent = flows.length ? String(flows.length) : "";
      const usual = medianIn(lane, ended, snapshot.at);
      note.textContent = usual === null ? " " : `${usual.of} a minute, median ${ms(usual.median)}`;
      const items = flows.slice(0, SHOWN).map((flow) => {
        shown.add(flow.id);
        return this.chip(flow).item;
      });
      if (flows.length > SHOWN) items.push(h("li", { class: "muted" }, `and ${flows.length - SHOWN} more`));
      if (items.length !== list.children.length || items.some((item, i) => item !== list.children[i])) list.replaceChildren(...items);
    }
    for (const id of [...this.chips.keys()]) if (!shown.has(id)) this.chips.delete(id);
    this.glide(before);
  }

  chip(flow) {
    let chip = this.chips.get(flow.id);
    if (chip === undefined) {
      const button = h("button", { type: "button", class: "chip", onclick: () => this.open(flow.id) });
      chip = { button, item: h("li", {}, button), stage: flow.stage };
      this.chips.set(flow.id, chip);
    }
    chip.stage = flow.stage;
    const { button } = chip;
    button.className = `chip s-${flow.stage}`;
    const where = { queue: "", prefill: flow.prefill ?? "", kv: flow.prefill ?? "" }[flow.stage] ?? flow.decode ?? "";
    const size = flow.stage === "decode" ? `${count(flow.made ?? 0)} tokens out` : `${count(flow.tokens ?? 0)} tokens`;
    const attempt = (flow.attempt ?? 0) > 1 ? `, attempt ${flow.attempt}` : "";
    const parts = [
      h("span", { class: "name", title: flow.id }, short(flow.id)),
      h("span", {}, seconds(flow.stage_s)),
      h("span", { class: "what" }, `${size}${attempt}${where ? `, ${where}` : ""}`),
    ];
    if (flow.done !== undefined && flow.done !== null) parts.push(bar(flow.done));
    button.replaceChildren(...parts);
    button.setAttribute("aria-label", `${flow.id}: ${STAGES[flow.stage]} for ${seconds(flow.stage_s)}, ${size}`);
    return chip;
  }

  /** A chip that has changed its lane glides there. */
  glide(before) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    for (const [id, chip] of this.chips) {
      const [stage, old] = before.get(id) ?? [];
      if (stage === undefined || stage === chip.stage) continue;
      const rect = chip.item.getBoundingClientRect();
      const from = `translate(${old.left - rect.left}px, ${old.top - rect.top}px)`;
      chip.item.animate([{ transform: from }, { transform: "none" }], { duration: 350, easing: "ease-out" });
    }
  }
}
