// Connect: the text that other programs need to use a model, with this server's address.
import { html } from "../html.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { authorization } from "../data/access.js";
import { whole } from "../data/units.js";
import { Copy } from "../parts.js";

/**
 * @typedef {import("../data/state.js").State} State
 * @typedef {{name: string, text: string, warning: string}} Program
 * @typedef {{model: string, context: number, base_url: string, key_file: string, programs: Program[]}} Programs
 */

/** @type {Record<string, string>} */
const TITLES = {
  codex: "Codex",
  claude: "Claude Code",
  opencode: "OpenCode",
  aider: "aider",
  openai: "OpenAI's libraries",
  anthropic: "Anthropic's libraries",
};

/** @param {{state: State}} props */
export function Connect({ state: { view } }) {
  const names = (view?.models ?? []).filter((model) => model.state === "ready").map((model) => model.name);
  const [chosen, choose] = useState("");
  const [found, setFound] = useState(/** @type {Programs | null} */ (null));
  const [problem, setProblem] = useState("");
  const model = names.includes(chosen) ? chosen : (names[0] ?? "");
  useEffect(() => {
    if (!model) return;
    const abort = new AbortController();
    load(model, abort.signal)
      .then((programs) => {
        setFound(programs);
        setProblem("");
      })
      .catch((/** @type {Error} */ error) => {
        if (!abort.signal.aborted) setProblem(error.message);
      });
    return () => abort.abort();
  }, [model]);
  if (!model) return html`<h1>Connect</h1><p>No model is served. Serve one first: <code>edgepipe serve MODEL</code></p>`;
  return html`
    <h1>Connect</h1>
    <div class="chat-head">
      <label for="served">Model</label>
      <select id="served" value=${model} onChange=${(/** @type {any} */ event) => choose(event.target.value)}>
        ${names.map((name) => html`<option value=${name}>${name}</option>`)}
      </select>
    </div>
    ${problem ? html`<p class="news bad" role="alert">${problem}</p>` : null}
    ${found ? html`<${ProgramTexts} found=${found} />` : null}
  `;
}

/** @param {string} model @param {AbortSignal} signal @returns {Promise<Programs>} */
async function load(model, signal) {
  const answer = await fetch(`/ui/connect?${new URLSearchParams({ model })}`, { headers: authorization(), signal });
  const document = await answer.json();
  if (!answer.ok) throw new Error(document.error?.message ?? `the node answered with status ${answer.status}`);
  return document;
}

/** @param {{found: Programs}} props */
function ProgramTexts({ found }) {
  return html`
    <dl class="figures">
      <div><dt>address of the API</dt><dd><code>${found.base_url}/v1</code></dd></div>
      <div><dt>tokens of context</dt><dd>${whole(found.context)}</dd></div>
    </dl>
    ${found.key_file
      ? html`<p class="news info">The texts read the API key from the file <code>${found.key_file}</code> in the present folder: put it there first.</p>`
      : null}
    ${found.programs.map(
      (program) => html`<section class="panel" aria-label=${TITLES[program.name] ?? program.name}>
        <h2>${TITLES[program.name] ?? program.name}</h2>
        ${program.warning ? html`<p class="news warn">${program.warning}</p>` : null}
        <div class="code">
          <div class="code-head"><span>edgepipe connect ${program.name}</span><${Copy} text=${program.text} /></div>
          <pre tabindex="0"><code>${program.text}</code></pre>
        </div>
      </section>`,
    )}
  `;
}
