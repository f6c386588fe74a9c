// A machine's memory as a bar: weights, KV used, KV free, other, free.
import { html } from "../html.js";
import { bytes } from "../data/units.js";

/** @typedef {import("../data/types.js").Memory} Memory */

/** @type {readonly (keyof Memory)[]} */
export const USES = ["weights", "kv_used", "kv_free", "other", "free"];

/** @type {Record<keyof Memory, string>} */
export const WORDS = { weights: "weights", kv_used: "KV used", kv_free: "KV free", other: "other", free: "free" };

/** @param {Memory} memory */
export function total(memory) {
  return USES.reduce((sum, use) => sum + memory[use], 0);
}

/** @param {Memory} memory */
export function used(memory) {
  return total(memory) - memory.free;
}

/**
 * Lay the parts out from left to right. Parts of no bytes are left out.
 *
 * @param {Memory} memory
 * @param {number} width
 * @returns {{use: keyof Memory, x: number, width: number}[]}
 */
export function layoutMemory(memory, width) {
  const all = total(memory);
  let x = 0;
  return USES.filter((use) => memory[use] > 0).map((use) => {
    const part = { use, x, width: (memory[use] / all) * width };
    x += part.width;
    return part;
  });
}

/** @param {Memory} memory */
export function memoryText(memory) {
  const parts = USES.filter((use) => memory[use] > 0).map((use) => `${WORDS[use]} ${bytes(memory[use])}`);
  return parts.length > 0 ? parts.join(", ") : "no memory is measured yet";
}

/**
 * Draw the bar inside an SVG.
 *
 * @param {{memory: Memory, x: number, y: number, width: number, height: number}} props
 */
export function MemoryBar({ memory, x, y, width, height }) {
  return html`<g transform="translate(${x} ${y})">
    ${layoutMemory(memory, width).map(
      (part) => html`<rect class="part ${part.use}" x=${part.x} y="0" width=${part.width} height=${height} />
        ${part.use !== "weights" && part.use !== "free"
          ? html`<rect x=${part.x} y="0" width=${part.width} height=${height} fill="url(#hatch-${part.use})" />`
          : null}`,
    )}
    <rect class="outline" x="0" y="0" width=${width} height=${height} />
  </g>`;
}

/** Hatches: uses differ without colours, too. The page needs them once, whatever the number of its bars. */
export function Hatches() {
  return html`<svg class="hatches" width="0" height="0" aria-hidden="true"><defs>
    <pattern id="hatch-kv_used" width="6" height="6" patternUnits="userSpaceOnUse">
      <path class="hatch" d="M0 6 L6 0 M-1 1 L1 -1 M5 7 L7 5" />
    </pattern>
    <pattern id="hatch-kv_free" width="8" height="8" patternUnits="userSpaceOnUse">
      <circle class="dot" cx="2" cy="2" r="1.1" /><circle class="dot" cx="6" cy="6" r="1.1" />
    </pattern>
    <pattern id="hatch-other" width="6" height="6" patternUnits="userSpaceOnUse"><path class="hatch" d="M0 3 H6" /></pattern>
  </defs></svg>`;
}

export function Legend() {
  return html`<ul class="legend">
    ${USES.map(
      (use) => html`<li>
        <svg width="22" height="12" aria-hidden="true">
          <rect class="part ${use}" width="22" height="12" />
          ${use !== "weights" && use !== "free"
            ? html`<rect width="22" height="12" fill="url(#hatch-${use})" />`
            : null}
          <rect class="outline" width="22" height="12" />
        </svg>
        ${WORDS[use]}
      </li>`,
    )}
  </ul>`;
}
