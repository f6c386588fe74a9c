// Machines as cards: device, memory, state, downloads.
import { html } from "../html.js";
import { bytes, milliseconds, percent } from "../data/units.js";
import { MemoryBar, memoryText, total, used } from "../pictures/memory.js";

/** @typedef {import("../data/types.js").Machine} Machine */

/** @param {Machine} machine */
export function stateOf(machine) {
  if (machine.state !== "alive") return "does not answer";
  if (machine.leaving) return "is leaving";
  if (machine.draining) return "is drained: takes no new work";
  const failed = machine.devices.find((device) => device.state === "failed");
  return failed?.error?.what ?? machine.devices.map((device) => device.state).join(", ");
}

/** @param {{machines: Machine[]}} props */
export function MachineCards({ machines }) {
  return html`<ul class="cards">
    ${machines.map((machine) => html`<li class="panel"><${MachineCard} machine=${machine} /></li>`)}
  </ul>`;
}

/** @param {{machine: Machine}} props */
function MachineCard({ machine }) {
  const { memory } = machine;
  const device = machine.devices.map((each) => each.name || each.backend).filter(Boolean).join(", ");
  return html`
    <h3>${machine.name}${machine.self ? html` <span class="quiet">this machine</span>` : null}</h3>
    <p class="quiet">${device || "no device"} · ${stateOf(machine)}${machine.self ? "" : ` · round trip ${milliseconds(machine.rtt_ms)}`}</p>
    <svg class="bar" role="img" aria-label=${memoryText(memory)} width="240" height="20" viewBox="0 0 240 20">
      <${MemoryBar} memory=${memory} x=${0} y=${0} width=${240} height=${20} />
    </svg>
    <p class="quiet">${bytes(used(memory))} of ${bytes(total(memory))}</p>
    ${machine.transfers.map(
      (transfer) => html`<p class="quiet">
        ${transfer.copy ? "copies" : "fetches"} ${transfer.model}: ${bytes(transfer.bytes_done)} of
        ${" "}${bytes(transfer.bytes_total)} (${percent(transfer.bytes_total ? transfer.bytes_done / transfer.bytes_total : 0)})
      </p>`,
    )}
  `;
}
