// The newest requests of this node, and what their times say.

/** @typedef {import("./types.js").RequestRow} RequestRow */

export const MOST = 200;

/**
 * Return the rows with changed and new ones, newest first.
 *
 * @param {RequestRow[]} before
 * @param {RequestRow[]} changed
 */
export function withRequests(before, changed) {
  const rows = new Map(before.map((row) => [row.id, row]));
  for (const row of changed) rows.set(row.id, row);
  return [...rows.values()].sort((a, b) => b.at_s - a.at_s || (a.id < b.id ? 1 : -1)).slice(0, MOST);
}

/** Time to the first token. @param {RequestRow} row */
export function firstTokenS(row) {
  return row.queue_s !== null && row.prefill_s !== null ? row.queue_s + row.prefill_s : null;
}

/**
 * Return the value below which a share of the values lies; null without values.
 *
 * @param {(number | null)[]} values
 * @param {number} share
 */
export function quantile(values, share) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? null;
}

/**
 * Return the length of each phase in seconds. The present phase lasts until now.
 *
 * @param {RequestRow} row
 * @param {number} now_s
 * @returns {{phase: "queue" | "prefill" | "decode", seconds: number}[]}
 */
export function phases(row, now_s) {
  const parts = [];
  let left = row.whole_s ?? Math.max(0, now_s - row.at_s);
  for (const phase of /** @type {const} */ (["queue", "prefill", "decode"])) {
    const seconds = row[`${phase}_s`] ?? left;
    parts.push({ phase, seconds });
    left = Math.max(0, left - seconds);
    if (row[`${phase}_s`] === null) break;
  }
  return parts;
}
