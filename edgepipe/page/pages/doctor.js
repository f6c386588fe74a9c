// What doctor finds on this node's machine.
import { html } from "../html.js";
import { useState } from "../vendor/hooks.js";
import { useResult } from "../data/results.js";
import { Copy } from "../parts.js";

/**
 * @typedef {import("../data/types.js").Task} Task
 * @typedef {{id: string, level: string, what: string, fact: string, remedy: string}} Finding
 */

/** @type {Record<string, string>} */
const MARKS = { ok: "✓", note: "·", warning: "!", problem: "✗" };

/** @param {{tasks: Task[], manages: boolean}} props */
export function Doctor({ tasks, manages }) {
  const [runs, setRuns] = useState(0);
  const { result: found } = useResult("doctor", "", tasks, manages && runs > 0, runs);
  const task = tasks.find((each) => each.kind === "doctor");
  const busy = task?.state === "running" || task?.state === "waiting";
  const findings = /** @type {Finding[]} */ (found?.findings ?? []);
  return html`<section class="panel" aria-labelledby="doctor">
    <div class="head">
      <h2 id="doctor">Doctor</h2>
      ${manages ? html`<button type="button" disabled=${busy} onClick=${() => setRuns((count) => count + 1)}>${busy ? "Checking …" : "Check this machine"}</button>` : null}
    </div>
    ${findings.length === 0 ? html`<p class="quiet">Checks this machine, its network and its peers: <code>edgepipe doctor</code></p>` : null}
    <ul class="findings">
      ${findings.map(
        (finding) => html`<li class=${finding.level}>
          <span aria-hidden="true">${MARKS[finding.level] ?? "·"}</span>
          <div>
            <span class="hidden">${finding.level}: </span>${finding.what}
            ${finding.fact ? html`<br /><span class="quiet">${finding.fact}</span>` : null}
            ${finding.remedy ? html`<br /><${Remedy} text=${finding.remedy} />` : null}
          </div>
        </li>`,
      )}
    </ul>
  </section>`;
}

/** What mends a finding: a command to copy, or advice. @param {{text: string}} props */
function Remedy({ text }) {
  const command = /^(edgepipe|pip|sudo|chmod|rm|ulimit) /.test(text) ? text.split("    (")[0] : "";
  return command ? html`<code>${command}</code> <${Copy} text=${command} />${text.slice(command.length)}` : text;
}
