// The links between machines, measured in both directions.
import { html } from "../html.js";
import { useState } from "../vendor/hooks.js";
import { act } from "../data/acting.js";
import { bytes, clock, milliseconds } from "../data/units.js";
import { Problem } from "../parts.js";

/**
 * @typedef {import("../data/types.js").Machine} Machine
 * @typedef {import("../data/types.js").Links} LinkSet
 * @typedef {import("../data/types.js").Link} Link
 */

/** How a link feels: below 1 ms good, below 5 ms fair. @param {Link | undefined} link */
export function quality(link) {
  if (link === undefined) return "none";
  return link.one_way_ms < 1 ? "good" : link.one_way_ms < 5 ? "fair" : "slow";
}

/** @param {{machines: Machine[], links: LinkSet, manages: boolean}} props */
export function Links({ machines, links, manages }) {
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState("");
  if (machines.length < 2) return null;
  const measure = async () => {
    setBusy(true);
    setProblem((await act("/ui/links")).problem);
    setBusy(false);
  };
  return html`<section class="panel" aria-labelledby="links">
    <div class="head">
      <h2 id="links">Links</h2>
      ${manages ? html`<button type="button" disabled=${busy} onClick=${() => void measure()}>${busy ? "Measuring …" : "Measure"}</button>` : null}
    </div>
    <${Problem} text=${problem} />
    ${links.at_s === 0
      ? html`<p class="quiet">Not measured since this machine's node started. A measurement takes some seconds and loads the links.</p>`
      : html`<p class="quiet">Measured at ${clock(links.at_s, Date.now() / 1000)}: one-way delay and rate, from the row's machine to the column's.</p>
          <div class="scroll" tabindex="0" role="region" aria-label="Links">
            <table class="matrix">
              <thead><tr><th scope="col">From</th>${machines.map((to) => html`<th scope="col">to ${to.name}</th>`)}</tr></thead>
              <tbody>
                ${machines.map(
                  (from) => html`<tr><th scope="row">${from.name}</th>${machines.map((to) => html`<${Cell} same=${from === to} link=${links.links.find((link) => link.from === from.id && link.to === to.id)} />`)}</tr>`,
                )}
              </tbody>
            </table>
          </div>`}
  </section>`;
}

/** @param {{same: boolean, link: Link | undefined}} props */
function Cell({ same, link }) {
  if (same) return html`<td class="quiet">–</td>`;
  if (link === undefined) return html`<td class="link none">no connection</td>`;
  return html`<td class="link ${quality(link)}">${milliseconds(link.one_way_ms)}<br /><span class="quiet">${bytes(link.bytes_per_s)}/s</span></td>`;
}
