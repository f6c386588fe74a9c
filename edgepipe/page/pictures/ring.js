// The ring: the stages of a model on their machines, and the ways of a token between them.
import { html } from "../html.js";
import { bytes, layers, milliseconds, percent, short } from "../data/units.js";
import { MemoryBar, memoryText, total, used } from "./memory.js";
import { CARD, layoutRing } from "./ring_layout.js";

/**
 * @typedef {import("../data/types.js").Model} Model
 * @typedef {import("../data/types.js").Machine} Machine
 * @typedef {import("../data/types.js").Stage} Stage
 */

const INNER = 14; // margin inside a card
const BAR = CARD.width - 2 * INNER;

/**
 * Return which stage and which edge are the slowest, by the engine's word: "stage 1" or "link 1-2"; -1: none.
 *
 * @param {string} bottleneck
 */
export function slowest(bottleneck) {
  const [kind, number] = bottleneck.split(" ");
  const index = Number.parseInt(number ?? "", 10);
  const found = Number.isInteger(index) ? index : -1;
  return { stage: kind === "stage" ? found : -1, edge: kind === "link" ? found : -1 };
}

/** @param {{model: Model, machines: Machine[], width: number}} props */
export function Ring({ model, machines, width }) {
  const { stages } = model;
  const layout = layoutRing(stages.length, width);
  const slow = slowest(model.bottleneck);
  const moving = model.state === "ready" && model.running > 0;
  const label = `Ring of ${model.name}: ${stages.map((stage) => `${stage.name} ${layers(stage.layers)}`).join(", ")}`;
  return html`<svg
    class="ring ${model.state}"
    role="img"
    aria-label=${label}
    viewBox="0 0 ${layout.width} ${layout.height}"
    width=${layout.width}
    height=${layout.height}
  >
    <defs>
      <marker id="arrow" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="11" markerHeight="11" markerUnits="userSpaceOnUse" orient="auto">
        <path class="arrow" d="M0 0 L8 4 L0 8 z" />
      </marker>
    </defs>
    ${layout.edges.map(
      (edge, index) => html`<g class="edge ${index === slow.edge ? "slow" : ""} ${moving ? "moving" : ""}">
        <path class="way" d=${edge.path} marker-end="url(#arrow)" />
        <${EdgeLabel} ...${edge} stage=${stages[index]} back=${index === stages.length - 1} slow=${index === slow.edge} />
      </g>`,
    )}
    ${stages.map(
      (stage, index) =>
        html`<${Card}
          stage=${stage}
          at=${layout.cards[index]}
          machine=${machines.find((machine) => machine.id === stage.machine)}
          slow=${index === slow.stage}
        />`,
    )}
  </svg>`;
}

/** @param {any} props of an edge, with its `stage`; `back`: it brings the token to the first stage */
function EdgeLabel({ label, anchor, stage, back, slow }) {
  const lines = back
    ? ["token"]
    : [stage.one_way_ms ? milliseconds(stage.one_way_ms) : "", stage.upload_ms ? `upload ${milliseconds(stage.upload_ms)}` : ""];
  if (slow) lines.push("slowest");
  return lines
    .filter((line) => line)
    .map(
      (line, index) => html`<text class="label" x=${label.x} y=${label.y + 15 * index} text-anchor=${anchor}>${line}</text>`,
    );
}

/** @param {string} device */
function plainDevice(device) {
  return device.replace(/\b(NVIDIA|GeForce|AMD|Apple) /g, "").replace(" (emulated)", "");
}

/** @param {{stage: Stage, at: {x: number, y: number}, machine: Machine | undefined, slow: boolean}} props */
function Card({ stage, at, machine, slow }) {
  const lost = machine === undefined || machine.state !== "alive";
  const memory = machine?.memory ?? { weights: 0, kv_used: 0, kv_free: 0, other: 0, free: 0 };
  const words = lost ? "does not answer" : `busy ${percent(stage.busy)}`;
  return html`<g class="card ${lost ? "lost" : ""} ${slow ? "slow" : ""}" transform="translate(${at.x} ${at.y})">
    <title>${stage.name}: ${stage.device}, ${memoryText(memory)}</title>
    <rect class="box" width=${CARD.width} height=${CARD.height} rx="10" />
    <text class="name" x=${INNER} y="25">${short(stage.name, slow ? 15 : 22)}</text>
    ${slow ? html`<text class="tag" x=${CARD.width - INNER} y="25" text-anchor="end">slowest</text>` : null}
    <text class="small" x=${INNER} y="45">${short(layers(stage.layers), 19)} · ${short(plainDevice(stage.device), 17)}</text>
    <${MemoryBar} memory=${memory} x=${INNER} y=${57} width=${BAR} height=${20} />
    <text class="small" x=${INNER} y="93">${bytes(used(memory))} of ${bytes(total(memory))}</text>
    <text class="small" x=${CARD.width - INNER} y="93" text-anchor="end">KV ${bytes(stage.kv_bytes)}</text>
    <rect class="track" x=${INNER} y="104" width=${BAR} height="6" rx="3" />
    <rect class="busy" x=${INNER} y="104" width=${BAR * Math.min(1, stage.busy)} height="6" rx="3" />
    <text class="small" x=${INNER} y="130">step ${milliseconds(stage.step_ms)}</text>
    <text class="small" x=${CARD.width - INNER} y="130" text-anchor="end">${words}</text>
  </g>`;
}
