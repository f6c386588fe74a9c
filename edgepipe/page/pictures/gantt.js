// A Gantt chart of the stages: when each worked on which micro-batch, and when it waited.
import { html } from "../html.js";
import { milliseconds, short } from "../data/units.js";

/**
 * @typedef {import("../data/types.js").Step} Step
 * @typedef {{x: number, y: number, width: number, colour: number, prompt: boolean, words: string}} Bar
 */

const LEFT = 96;
const ROW = 34;
const BAR = 22;
const TOP = 6;
const BOTTOM = 22;
const COLOURS = 6; // of micro-batches; a seventh has the first one's colour

/**
 * Lay out the steps of a window. A bar is at least half a pixel wide.
 *
 * @param {Step[]} steps
 * @param {number} begin microseconds
 * @param {number} end microseconds
 * @param {number} width
 * @returns {Bar[]}
 */
export function layoutGantt(steps, begin, end, width) {
  const scale = (width - LEFT - 6) / Math.max(1, end - begin);
  return steps.flatMap((step) =>
    step.spans
      .map((span, stage) => {
        const from = Math.max(begin, span.begin);
        const to = Math.min(end, span.begin + span.length);
        const work = step.prompt_tokens ? `${step.prompt_tokens} prompt tokens` : `${step.decode_rows} rows`;
        return {
          x: LEFT + (from - begin) * scale,
          y: TOP + stage * ROW,
          width: to > from ? Math.max(0.5, (to - from) * scale) : 0,
          colour: (step.step % step.micro_batches) % COLOURS,
          prompt: step.prompt_tokens > 0,
          words: `step ${step.step}, micro-batch ${step.step % step.micro_batches}: ${work}, ${milliseconds(span.length / 1000)}`,
        };
      })
      .filter((bar) => bar.width > 0),
  );
}

/** @param {{steps: Step[], stages: string[], begin: number, end: number, width: number}} props */
export function Gantt({ steps, stages, begin, end, width }) {
  const height = TOP + stages.length * ROW + BOTTOM;
  const shares = width < 560 ? [0, 1] : [0, 0.25, 0.5, 0.75, 1];
  const marks = shares.map((share) => ({
    x: LEFT + (width - LEFT - 6) * share,
    text: share === 1 ? "now" : `−${milliseconds(((1 - share) * (end - begin)) / 1000)}`,
  }));
  return html`<svg class="gantt" role="img" aria-label="When each stage worked" width=${width} height=${height}>
    <defs>
      <pattern id="hatch-prompt" width="6" height="6" patternUnits="userSpaceOnUse">
        <path class="hatch" d="M0 6 L6 0 M-1 1 L1 -1 M5 7 L7 5" />
      </pattern>
    </defs>
    ${stages.map(
      (name, stage) => html`<rect class="track" x=${LEFT} y=${TOP + stage * ROW} width=${width - LEFT - 6} height=${BAR} />
        <text class="label" x=${LEFT - 8} y=${TOP + stage * ROW + 15} text-anchor="end">${short(name, 13)}</text>`,
    )}
    ${marks.map(
      (mark, index) => html`<line class="grid" x1=${mark.x} x2=${mark.x} y1=${TOP} y2=${height - BOTTOM} />
        <text class="label" x=${mark.x} y=${height - 5} text-anchor=${index === 0 ? "start" : index === shares.length - 1 ? "end" : "middle"}>${mark.text}</text>`,
    )}
    ${layoutGantt(steps, begin, end, width).map(
      (bar) => html`<g>
        <title>${bar.words}</title>
        <rect class="batch b${bar.colour}" x=${bar.x} y=${bar.y} width=${bar.width} height=${BAR} />
        ${bar.prompt ? html`<rect x=${bar.x} y=${bar.y} width=${bar.width} height=${BAR} fill="url(#hatch-prompt)" />` : null}
      </g>`,
    )}
  </svg>`;
}
