// The history that the page has seen. Pure: nothing here touches the page.

import { WINDOW_S } from "./charts.js";

const KEEP = 200;

/** What the page knows. A frontend that has restarted knows less, so what it tells is merged in. */
export class Memory {
  constructor() {
    this.snapshot = null;
    this.ended = [];
    this.own = [];
    this.steps = new Map();
  }

  /** Take a snapshot, as the frontend sent it. */
  take(snapshot) {
    const before = this.snapshot;
    if (before && before.frontend === snapshot.frontend && snapshot.since > before.since) {
      this.own.push({ at: snapshot.since, kind: "restarted", who: snapshot.frontend });
    } else if (before && before.frontend !== snapshot.frontend) {
      this.own.push({ at: snapshot.at, kind: "joined", who: snapshot.frontend, text: "this page shows it now" });
    }
    this.snapshot = snapshot;
    for (const point of snapshot.points ?? []) this.steps.set(point.at, merged(this.steps.get(point.at), point));
    const oldest = snapshot.at - WINDOW_S;
    for (const at of [...this.steps.keys()]) if (at < oldest - 5) this.steps.delete(at);
    const known = new Set(this.ended.map((row) => row.id));
    const fresh = (snapshot.ended ?? []).filter((row) => !known.has(row.id));
    this.ended = [...this.ended, ...fresh].slice(-KEEP);
    this.own = this.own.filter((mark) => mark.at > oldest);
  }

  points() {
    return [...this.steps.values()].sort((a, b) => a.at - b.at);
  }

  marks() {
    return [...(this.snapshot?.marks ?? []), ...this.own].sort((a, b) => a.at - b.at);
  }
}

/** A point that is known from two processes of a frontend: requests of both, samples of the newer. */
export function merged(old, point) {
  if (old === undefined || (point.done ?? 0) >= (old.done ?? 0)) return point;
  return { ...old, backlog_s: point.backlog_s ?? old.backlog_s, workers: point.workers ?? old.workers };
}
