// Speeds of the last 15 minutes, one sample a second.

/** @typedef {import("./types.js").Sample} Sample */

export const SECONDS = 900;

/**
 * Return the histories with a sample more, without models that are no longer served.
 *
 * @param {Record<string, Sample[]>} before
 * @param {Record<string, Sample>} sample
 * @returns {Record<string, Sample[]>}
 */
export function withSample(before, sample) {
  return Object.fromEntries(
    Object.entries(sample).map(([model, row]) => [model, [...(before[model] ?? []), row].slice(-SECONDS)]),
  );
}

/**
 * Return the mean of each minute, newest first: minutes ago, tokens per second, predicted rate, running.
 *
 * @param {Sample[]} samples
 * @returns {{minutes: number, tokens_per_s: number, predicted: number, running: number}[]}
 */
export function byMinute(samples) {
  const rows = [];
  for (let end = samples.length, minutes = 0; end > 0; end -= 60, minutes += 1) {
    const part = samples.slice(Math.max(0, end - 60), end);
    /** @param {number} field */
    const mean = (field) => part.reduce((sum, row) => sum + (row[field] ?? 0), 0) / part.length;
    rows.push({ minutes, tokens_per_s: mean(0), predicted: mean(1), running: mean(2) });
  }
  return rows;
}
