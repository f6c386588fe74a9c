// Tokens per second over the last 15 minutes; the predicted rate is dashed.
import { html } from "../html.js";
import { rate } from "../data/units.js";
import { SECONDS } from "../data/history.js";

/** @typedef {import("../data/types.js").Sample} Sample */

const LEFT = 44;
const BOTTOM = 22;
const TOP = 8;

/**
 * Return the end of the scale: 1, 2 or 5 times a power of ten, at least `value`.
 *
 * @param {number} value
 */
export function scaleEnd(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const step = [1, 2, 5, 10].find((each) => each * power >= value * 0.999999) ?? 10;
  return step * power;
}

/**
 * Lay out both lines. The newest sample stands at the right.
 *
 * @param {Sample[]} samples
 * @param {number} width
 * @param {number} height
 */
export function layoutSpeed(samples, width, height) {
  const end = scaleEnd(samples.reduce((most, row) => Math.max(most, row[0], row[1]), 0));
  const [innerWidth, innerHeight] = [width - LEFT - 6, height - BOTTOM - TOP];
  /** @param {number} index */
  const x = (index) => LEFT + innerWidth * ((SECONDS - samples.length + index) / (SECONDS - 1));
  /** @param {number} value */
  const y = (value) => TOP + innerHeight * (1 - value / end);
  /** @param {0 | 1} field */
  const line = (field) =>
    samples.map((row, index) => `${index ? "L" : "M"}${x(index).toFixed(1)} ${y(row[field]).toFixed(1)}`).join("");
  const marks = [0, 0.5, 1].map((share) => ({ y: y(share * end), text: rate(share * end) }));
  const times = [15, 10, 5, 0].map((minutes) => ({
    x: LEFT + innerWidth * (1 - minutes / 15),
    text: minutes ? `−${minutes} min` : "now",
  }));
  return { speed: line(0), predicted: samples.some((row) => row[1] > 0) ? line(1) : "", marks, times };
}

/** @param {{samples: Sample[], width: number}} props */
export function Speed({ samples, width }) {
  const height = 170;
  const layout = layoutSpeed(samples, width, height);
  return html`<svg class="speed" role="img" aria-label="Tokens per second, last 15 minutes" width=${width} height=${height}>
    ${layout.marks.map(
      (mark) => html`<line class="grid" x1=${LEFT} x2=${width - 6} y1=${mark.y} y2=${mark.y} />
        <text class="label" x=${LEFT - 6} y=${mark.y + 4} text-anchor="end">${mark.text}</text>`,
    )}
    ${layout.times.map(
      (time, index) =>
        html`<text class="label" x=${time.x} y=${height - 5} text-anchor=${["start", "middle", "middle", "end"][index]}>
          ${time.text}
        </text>`,
    )}
    <path class="predicted" d=${layout.predicted} />
    <path class="line" d=${layout.speed} />
  </svg>`;
}
