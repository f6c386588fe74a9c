// The log of this page's node: the newest lines, then new ones.
import { html } from "../html.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { follow } from "../data/acting.js";
import { Problem } from "../parts.js";

const MOST_LINES = 1000;

export function Log() {
  const [shown, show] = useState(false);
  return html`<section class="panel" aria-labelledby="log">
    <div class="head">
      <h2 id="log">Log of this node</h2>
      <button type="button" aria-expanded=${shown} onClick=${() => show(!shown)}>${shown ? "Hide" : "Show"}</button>
    </div>
    ${shown ? html`<${Lines} />` : html`<p class="quiet">As <code>edgepipe logs --follow</code> shows it.</p>`}
  </section>`;
}

function Lines() {
  const [lines, setLines] = useState(/** @type {string[]} */ ([]));
  const [problem, setProblem] = useState("");
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    const abort = new AbortController();
    const take = (/** @type {string} */ _name, /** @type {string} */ line) => setLines((before) => [...before, line].slice(-MOST_LINES));
    void follow("/ui/log", {}, abort.signal, take).then(setProblem);
    return () => abort.abort();
  }, []);
  useEffect(() => {
    const element = box.current;
    if (element && element.scrollHeight - element.clientHeight - element.scrollTop < 80) element.scrollTop = element.scrollHeight;
  }, [lines]);
  return html`<${Problem} text=${problem} /><pre class="lines log" tabindex="0" ref=${box} aria-label="Log">${lines.join("\n")}</pre>`;
}
