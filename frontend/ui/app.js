// The live page of a pullfill frontend.
//
// State: the last snapshot, and the requests that this page has seen end. The frontend sends a
// snapshot a second (pullfill/snapshot.py). When it goes away the page keeps what it has, and connects
// again. A hidden page disconnects: nobody looks at it.

import { Detail } from "./detail.js";
import { h, outages } from "./dom.js";
import { Flow } from "./flow.js";
import { Memory } from "./memory.js";
import * as tables from "./tables.js";

const AGAIN_MS = 1000;
const HIDDEN_MS = 30_000;
const byId = (id) => document.getElementById(id);

class Page {
  constructor() {
    this.memory = new Memory();
    this.paused = false;
    this.source = null;
    this.pressed = false;
    this.detail = new Detail(byId("detail"), {
      get snapshot() { return page.memory.snapshot; },
      get ended() { return page.memory.ended; },
    });
    this.flow = new Flow(byId("flow"), (id) => this.detail.request(id));
    byId("pause").addEventListener("click", () => this.pause(!this.paused));
    document.addEventListener("keydown", (event) => this.onKey(event));
    document.addEventListener("visibilitychange", () => this.onVisible());
    // What is under a pressed pointer is not replaced, or the click would be lost.
    document.addEventListener("pointerdown", () => { this.pressed = true; });
    for (const end of ["pointerup", "pointercancel"]) document.addEventListener(end, () => setTimeout(() => { this.pressed = false; }));
    this.connect();
  }

  // ------------------------------------------------------------------ the connection

  connect() {
    this.source?.close();
    this.source = new EventSource("ui/events");
    this.source.onmessage = (event) => this.onSnapshot(JSON.parse(event.data));
    this.source.onerror = () => {
      this.status("connecting again", "warn");
      // A browser gives up when it is answered with an error, as by a proxy whose frontend restarts.
      if (this.source?.readyState === EventSource.CLOSED) setTimeout(() => this.source && this.connect(), AGAIN_MS);
    };
  }

  onVisible() {
    clearTimeout(this.hiding);
    if (document.hidden) {
      this.hiding = setTimeout(() => {
        this.source?.close();
        this.source = null;
      }, HIDDEN_MS);
    } else if (this.source === null) this.connect();
    else this.render();
  }

  onSnapshot(snapshot) {
    this.memory.take(snapshot);
    this.status(this.paused ? "paused" : "live", this.paused ? "warn" : "good");
    if (!this.paused && !document.hidden) this.render();
  }

  status(text, kind) {
    const link = byId("link");
    if (link.textContent !== text) link.textContent = text;
    link.className = `badge ${kind}`;
  }

  pause(paused) {
    this.paused = paused;
    byId("pause").setAttribute("aria-pressed", String(paused));
    byId("pause").textContent = paused ? "Go on" : "Pause";
    if (this.memory.snapshot) this.onSnapshot(this.memory.snapshot);
  }

  onKey(event) {
    const typing = event.target.closest?.("input, select, textarea");
    if (event.key === "p" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) this.pause(!this.paused);
  }

  // ------------------------------------------------------------------ what is shown

  render() {
    const { snapshot, ended } = this.memory;
    if (snapshot === null || this.pressed) return;
    document.title = `pullfill: ${snapshot.model}`;
    const others = (snapshot.frontends ?? 1) > 1 ? ` (one of ${snapshot.frontends} frontends)` : "";
    const teller = snapshot.frontend ? `at ${snapshot.frontend}${others}` : "as its workers tell";
    byId("model").textContent = `${snapshot.model} ${teller}`;
    const away = outages(snapshot);
    const servers = away.length ? away.map((why) => h("span", { class: "bad" }, `▲ ${why} `)) : [h("span", { class: "muted" }, "NATS and etcd answer")];
    byId("servers").replaceChildren(...servers);
    byId("figures").replaceChildren(...tables.figures(snapshot));
    this.flow.show(snapshot, ended);
    keepFocus(byId("workers"), tables.workers(snapshot, (id) => this.detail.worker(id)));
    byId("decisions").replaceChildren(...tables.decisions(ended));
    keepFocus(byId("ended"), tables.ended(ended, (id) => this.detail.request(id)));
    const hidden = snapshot.hidden ? ` ${snapshot.hidden} more requests under way are not shown.` : "";
    const whose = snapshot.frontend ? "of this frontend" : "that no frontend has sent";
    byId("foot").textContent = `Requests are those ${whose}; workers and jobs those of the cluster.${hidden}`;
    this.detail.refresh();
  }
}

/** Replace the rows of a table. A button that has the focus keeps it. */
function keepFocus(element, parts) {
  const focused = element.contains(document.activeElement) ? document.activeElement : null;
  const name = focused?.tagName === "BUTTON" ? (focused.title || focused.textContent) : null;
  element.replaceChildren(...parts);
  if (name === null) return;
  const again = [...element.querySelectorAll("button")].find((button) => (button.title || button.textContent) === name);
  again?.focus({ preventScroll: true });
}

const page = new Page();
window.pullfill = page;
