// Settings of a chat, with their bounds.
import { html } from "../html.js";
import { BOUNDS, NO_SETTINGS } from "../data/answer.js";

/** @typedef {import("../data/answer.js").Settings} Settings */

/** @param {{settings: Settings, onChange: (settings: Settings) => void}} props */
export function SettingsForm({ settings, onChange }) {
  const set = (/** @type {string} */ name, /** @type {string} */ value) => onChange({ ...settings, [name]: value });
  return html`<details class="settings">
    <summary>Settings</summary>
    <div class="fields">
      ${Object.entries(BOUNDS).map(
        ([name, { least, most, step, words }]) => html`<div>
          <label for=${name}>${words}</label>
          <input id=${name} type="number" min=${least} max=${most} step=${step} placeholder="the model's"
            value=${settings[/** @type {keyof Settings} */ (name)]} onInput=${(/** @type {any} */ event) => set(name, event.target.value)} />
        </div>`,
      )}
      <div class="wide">
        <label for="system">Instructions (system prompt)</label>
        <textarea id="system" rows="2" value=${settings.system} onInput=${(/** @type {any} */ event) => set("system", event.target.value)}></textarea>
      </div>
      <button type="button" onClick=${() => onChange(NO_SETTINGS)}>Reset</button>
    </div>
  </details>`;
}
