// Where the time of a request went: queue, prompt, answer.
import { html } from "../html.js";

/** @type {Record<string, string>} */
export const PHASES = { queue: "queue", prefill: "prompt", decode: "answer" };

/** @param {{parts: {phase: string, seconds: number}[], most_s: number, words: string}} props */
export function PhaseBar({ parts, most_s, words }) {
  const width = 160;
  let x = 0;
  return html`<svg class="phases" role="img" aria-label=${words} width=${width} height="14" viewBox="0 0 ${width} 14">
    ${parts.map(({ phase, seconds }) => {
      const part = { x, width: Math.max(0.5, (seconds / Math.max(0.001, most_s)) * width) };
      x += part.width;
      return html`<rect class="phase ${phase}" x=${part.x} y="1" width=${part.width} height="12" />
        ${phase === "queue" ? html`<rect x=${part.x} y="1" width=${part.width} height="12" fill="url(#hatch-other)" />` : null}
        ${phase === "prefill" ? html`<rect x=${part.x} y="1" width=${part.width} height="12" fill="url(#hatch-kv_used)" />` : null}`;
    })}
  </svg>`;
}

export function PhaseLegend() {
  return html`<ul class="legend">
    ${Object.entries(PHASES).map(
      ([phase, words]) => html`<li>
        <svg width="22" height="12" aria-hidden="true">
          <rect class="phase ${phase}" width="22" height="12" />
          ${phase === "queue" ? html`<rect width="22" height="12" fill="url(#hatch-other)" />` : null}
          ${phase === "prefill" ? html`<rect width="22" height="12" fill="url(#hatch-kv_used)" />` : null}
        </svg>
        ${words}
      </li>`,
    )}
  </ul>`;
}
