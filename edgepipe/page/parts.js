// Small parts that several pages use.
import { html } from "./html.js";
import { useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";

/**
 * A picture's twin: the same figures as a table.
 *
 * @param {{title: string, columns: string[], rows: (string | number)[][]}} props
 */
export function Twin({ title, columns, rows }) {
  return html`<details class="twin">
    <summary>${title} as a table</summary>
    <div class="scroll" tabindex="0" role="region" aria-label=${title}>
      <table>
        <thead>
          <tr>${columns.map((column) => html`<th scope="col">${column}</th>`)}</tr>
        </thead>
        <tbody>
          ${rows.map((row) => html`<tr>${row.map((cell) => html`<td>${cell}</td>`)}</tr>`)}
        </tbody>
      </table>
    </div>
  </details>`;
}

/**
 * Return a ref and the width of its element in pixels; 0 before the first layout.
 *
 * @returns {[{current: HTMLElement | null}, number]}
 */
export function useWidth() {
  const ref = useRef(/** @type {HTMLElement | null} */ (null));
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const element = ref.current;
    if (element === null) return;
    const watch = new ResizeObserver(() => setWidth(Math.floor(element.clientWidth)));
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  return [ref, width];
}

/**
 * A button that copies a text and says so.
 *
 * @param {{text: string, label?: string}} props
 */
export function Copy({ text, label = "Copy" }) {
  const [said, setSaid] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setSaid("Copied");
    } catch {
      setSaid("The browser does not allow it");
    }
    setTimeout(() => setSaid(""), 2000);
  };
  return html`<button type="button" class="quiet" onClick=${copy} aria-live="polite">${said || label}</button>`;
}

/** A problem for people; nothing without a text. @param {{text: string}} props */
export function Problem({ text }) {
  return text ? html`<p class="news bad" role="alert">${text}</p>` : null;
}

/**
 * A button that asks once more before it acts.
 *
 * @param {{label: string, question: string, onYes: () => void}} props
 */
export function Confirm({ label, question, onYes }) {
  const [asks, ask] = useState(false);
  const yes = useRef(/** @type {HTMLButtonElement | null} */ (null));
  useLayoutEffect(() => {
    if (asks) yes.current?.focus();
  }, [asks]);
  if (!asks) return html`<button type="button" onClick=${() => ask(true)}>${label}</button>`;
  return html`<span class="confirm" role="group" aria-label=${question}>
    <span>${question}</span>
    <button type="button" ref=${yes} class="danger" onClick=${() => { ask(false); onYes(); }}>Yes</button>
    <button type="button" onClick=${() => ask(false)}>No</button>
  </span>`;
}

/** Offer a text as a file. @param {string} name @param {string} text */
export function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
