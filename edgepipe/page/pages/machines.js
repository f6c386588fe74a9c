// Machines: devices, versions, links, and who belongs to the cluster.
import { html } from "../html.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { act, get } from "../data/acting.js";
import { bytes, clock, milliseconds } from "../data/units.js";
import { Confirm, Problem, Twin } from "../parts.js";
import { MemoryBar, memoryText } from "../pictures/memory.js";
import { Doctor } from "./doctor.js";
import { Invite } from "./invite.js";
import { Links } from "./links.js";
import { Log } from "./log.js";
import { stateOf } from "./machine_cards.js";
import { Tasks, ended } from "./tasks.js";

/**
 * @typedef {import("../data/state.js").State} State
 * @typedef {import("../data/types.js").Machine} Machine
 * @typedef {{id: string, name: string, role: string, state: string, address: string, added_s: number, added_by: string,
 *   self: boolean}} Peer
 */

/** @param {{state: State, manages: boolean}} props */
export function Machines({ state, manages }) {
  const machines = state.view?.machines ?? [];
  const [peers, setPeers] = useState(/** @type {Peer[]} */ ([]));
  const [problem, setProblem] = useState("");
  const [changes, setChanges] = useState(0);
  const names = machines.map((machine) => machine.id).join(" ");
  useEffect(() => {
    void get("/ui/peers").then(({ data, problem: found }) => {
      setPeers(data?.peers ?? []);
      if (found) setProblem(found);
    });
  }, [names, changes]);
  const changed = (/** @type {string} */ found) => {
    setProblem(found);
    setChanges((count) => count + 1);
  };
  const away = peers.filter((peer) => !machines.some((machine) => machine.id === peer.id));
  return html`
    <h1>Machines</h1>
    ${manages ? null : html`<p class="news info">To add, remove or drain machines, type <code>edgepipe open</code> on this node's machine.</p>`}
    <${Problem} text=${problem} />
    <ul class="cards wide">
      ${machines.map(
        (machine) => html`<li class="panel" key=${machine.id}>
          <${Card} machine=${machine} newest=${state.view?.newest ?? ""} peer=${peers.find((peer) => peer.id === machine.id)} state=${state} manages=${manages} onChange=${changed} />
        </li>`,
      )}
      ${away.map((peer) => html`<li class="panel" key=${peer.id}><${Away} peer=${peer} manages=${manages} onChange=${changed} /></li>`)}
    </ul>
    <${Twin} title="Machines" columns=${["Machine", "Role", "State", "Version", "Platform", "Device", "Round trip", "Free disk"]} rows=${machines.map((machine) => row(machine, peers))} />
    ${manages ? html`<${Invite} onJoined=${() => setChanges((count) => count + 1)} />` : null}
    <${Tasks} tasks=${state.tasks.filter((task) => task.kind === "drain")} manages=${manages} />
    <${Links} machines=${machines} links=${state.links} manages=${manages} />
    <${Doctor} tasks=${state.tasks} manages=${manages} />
    ${manages ? html`<${Log} />` : null}
  `;
}

/** @param {Machine} machine @param {string} newest */
function behind(machine, newest) {
  return machine.version !== "" && newest !== "" && machine.version !== newest;
}

/** @param {Machine} machine @param {Peer[]} peers */
function row(machine, peers) {
  const role = peers.find((peer) => peer.id === machine.id)?.role ?? "–";
  const devices = machine.devices.map((device) => device.name || device.backend).join(", ");
  const trip = machine.self ? "–" : milliseconds(machine.rtt_ms);
  return [machine.name, role, stateOf(machine), machine.version, machine.platform, devices, trip, bytes(machine.disk_free_bytes)];
}

/** @param {{machine: Machine, newest: string, peer: Peer | undefined, state: State, manages: boolean, onChange: (problem: string) => void}} props */
function Card({ machine, newest, peer, state, manages, onChange }) {
  const { memory } = machine;
  const drains = state.tasks.some((task) => task.kind === "drain" && !ended(task));
  const start = async () => onChange((await act("/ui/tasks", { kind: "drain" })).problem);
  const undo = async () => onChange((await act("/ui/undrain")).problem);
  return html`
    <h3>${machine.name} ${machine.self ? html`<span class="quiet">this machine</span>` : null}</h3>
    <p class="quiet">${stateOf(machine)}${machine.self ? "" : ` · round trip ${milliseconds(machine.rtt_ms)}`}</p>
    <svg class="bar" role="img" aria-label=${memoryText(memory)} width="240" height="20" viewBox="0 0 240 20">
      <${MemoryBar} memory=${memory} x=${0} y=${0} width=${240} height=${20} />
    </svg>
    <dl class="facts">
      ${machine.devices.map((device) => html`<dt>Device</dt><dd>${device.name.replace(" (emulated)", "") || "–"} (${device.backend || "no backend"})${device.error ? html`<br />${device.error.what}. ${device.error.next_step}` : null}</dd>`)}
      <dt>edgepipe</dt><dd>${machine.version || "–"}${behind(machine, newest) ? html`. Another machine has ${newest}: type <code>edgepipe update</code> on ${machine.name}${machine.apart ? ". Only versions at most one minor apart are tested together" : ""}` : null}</dd>
      <dt>System</dt><dd>${machine.platform || "–"}</dd>
      <dt>Free disk</dt><dd>${bytes(machine.disk_free_bytes)}</dd>
      ${peer ? html`<dt>Role</dt><dd>${peer.role}${peer.added_by && peer.added_by !== peer.name ? `, let in by ${peer.added_by}` : ""}</dd>` : null}
    </dl>
    ${manages && machine.self ? html`<div class="row">${machine.draining ? html`<button type="button" onClick=${undo}>Take work again</button>` : html`<${Confirm} label="Drain" question="Move all work of this machine to others?" onYes=${start} />`}${drains ? html`<span class="quiet">work moves away</span>` : null}</div>` : null}
    ${manages && peer && !peer.self ? html`<${PeerActions} peer=${peer} onChange=${onChange} />` : null}
  `;
}

/** @param {{peer: Peer, manages: boolean, onChange: (problem: string) => void}} props */
function Away({ peer, manages, onChange }) {
  return html`
    <h3>${peer.name}</h3>
    <p class="quiet">${peer.state === "left" ? "stopped" : "not heard"} · last at ${peer.address || "no known address"}</p>
    <p class="quiet">${peer.role}, since ${clock(peer.added_s, Date.now() / 1000)}</p>
    ${manages ? html`<${PeerActions} peer=${peer} onChange=${onChange} />` : null}
  `;
}

/** @param {{peer: Peer, onChange: (problem: string) => void}} props */
function PeerActions({ peer, onChange }) {
  const promote = async () => onChange((await act("/ui/peers/promote", { peer: peer.id })).problem);
  const remove = async () => onChange((await act("/ui/peers/remove", { peer: peer.id, others: "keep" })).problem);
  return html`<div class="row">
    ${peer.role === "member" ? html`<${Confirm} label="Promote" question=${`Let ${peer.name} invite and remove machines?`} onYes=${promote} />` : null}
    <${Confirm} label="Remove" question=${`Remove ${peer.name} for ever?`} onYes=${remove} />
  </div>`;
}
