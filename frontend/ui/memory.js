// The requests that the page has seen end. Pure: nothing here touches the page.

const KEEP = 200;

/** What the page knows. A frontend that has restarted knows less, so what it tells is merged in. */
export class Memory {
  constructor() {
    this.snapshot = null;
    this.ended = [];
  }

  /** Take a snapshot, as the frontend sent it. */
  take(snapshot) {
    this.snapshot = snapshot;
    const known = new Set(this.ended.map((row) => row.id));
    const fresh = (snapshot.ended ?? []).filter((row) => !known.has(row.id));
    this.ended = [...this.ended, ...fresh].slice(-KEEP);
  }
}
