// A pairing window: it is open as long as this part of the page is.
import { html } from "../html.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { act, follow } from "../data/acting.js";
import { Copy, Problem } from "../parts.js";

/** @param {{onJoined: () => void}} props */
export function Invite({ onJoined }) {
  const [opened, setOpened] = useState(/** @type {any} */ (null));
  const [asks, setAsks] = useState(/** @type {any} */ (null));
  const [news, setNews] = useState(/** @type {string[]} */ ([]));
  const [problem, setProblem] = useState("");
  const running = useRef(/** @type {AbortController | null} */ (null));
  useEffect(() => () => running.current?.abort(), []);
  const end = () => {
    running.current?.abort();
    running.current = null;
    setOpened(null);
    setAsks(null);
  };
  const take = (/** @type {string} */ _name, /** @type {any} */ event) => {
    if (event.kind === "opened") setOpened(event);
    if (event.kind === "asks") setAsks(event);
    if (event.kind === "failed") setNews((before) => [...before, `${event.name || "A machine"} (${event.address}): ${event.what}. ${event.tries_left} tries left.`]);
    if (event.kind === "joined") {
      setAsks(null);
      setNews((before) => [...before, `${event.name} joined as ${event.role}.`]);
      onJoined();
    }
  };
  const invite = async () => {
    setNews([]);
    setProblem("");
    const abort = (running.current = new AbortController());
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" };
    const found = await follow("/ui/invite", options, abort.signal, take);
    if (running.current !== abort) return;
    end();
    setProblem(found);
  };
  const answer = async (/** @type {boolean} */ accept) => {
    setAsks(null);
    setProblem((await act("/ui/invite/answer", { accept })).problem);
  };
  return html`<section class="panel" aria-labelledby="invite">
    <h2 id="invite">Add a machine</h2>
    ${opened
      ? html`
          <p>On the other machine, type</p>
          <div class="code"><div class="code-head"><span>valid ${Math.round(opened.valid_s / 60)} minutes, for one machine</span><${Copy} text=${`edgepipe node join ${opened.code}`} /></div>
            <pre tabindex="0"><code>edgepipe node join ${opened.code}</code></pre></div>
          <p class="quiet">If it does not find this machine: <code>edgepipe node join --host ${opened.where} ${opened.code}</code>. The code ends when this page is closed.</p>
          <button type="button" onClick=${end}>End the invitation</button>
        `
      : html`<button type="button" onClick=${() => void invite()}>Invite a machine</button>`}
    ${asks
      ? html`<div class="news warn" role="alertdialog" aria-label="A machine wants to join">
          <p><strong>${asks.name}</strong> (${asks.address}) gave the right code. Its key begins with <code>${asks.key}</code>.</p>
          <div class="row"><button type="button" class="primary" onClick=${() => void answer(true)}>Let it join</button><button type="button" onClick=${() => void answer(false)}>Refuse</button></div>
        </div>`
      : null}
    <div role="status">${news.map((each) => html`<p class="quiet">${each}</p>`)}</div>
    <${Problem} text=${problem} />
  </section>`;
}
