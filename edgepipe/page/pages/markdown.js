// Markdown as elements. Only the lexer of marked runs: HTML is shown as text, images are not fetched.
import { html } from "../html.js";
import { useMemo, useRef } from "../vendor/hooks.js";
import { GrowingMarkdown, safeLink, withoutEntities } from "../data/markdown.js";
import { Copy } from "../parts.js";

/** @typedef {import("../vendor/marked.js").Token} Token */

const MOST_DEPTH = 20; // nested lists and quotes beyond it are shown as text

/** @param {{text: string}} props */
export function Markdown({ text }) {
  const reader = useRef(/** @type {GrowingMarkdown | null} */ (null));
  reader.current ??= new GrowingMarkdown();
  const { done, open } = reader.current.read(text);
  const finished = useMemo(() => ({ count: 0, nodes: /** @type {any[]} */ ([]) }), []);
  if (done.length < finished.count) Object.assign(finished, { count: 0, nodes: [] });
  for (const token of done.slice(finished.count)) finished.nodes.push(block(token, 0));
  finished.count = done.length;
  return html`<div class="markdown">${[...finished.nodes]}${open.map((token) => block(token, 0))}</div>`;
}

/** @param {Token} token @param {number} depth @returns {any} */
function block(token, depth) {
  if (depth > MOST_DEPTH) return token.raw;
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return html`<p class="heading h${token.depth}" role="heading" aria-level=${Math.min(6, (token.depth ?? 1) + 2)}>${inline(token, depth)}</p>`;
    case "paragraph":
      return html`<p>${inline(token, depth)}</p>`;
    case "text":
      return token.tokens ? inline(token, depth) : withoutEntities(token.text ?? token.raw);
    case "code":
      return html`<${Code} text=${token.text ?? ""} language=${token.lang ?? ""} />`;
    case "blockquote":
      return html`<blockquote>${(token.tokens ?? []).map((each) => block(each, depth + 1))}</blockquote>`;
    case "hr":
      return html`<hr />`;
    case "list":
      return list(token, depth);
    case "table":
      return table(token, depth);
    default:
      return html`<p>${token.raw}</p>`;
  }
}

/** @param {Token} token @param {number} depth */
function list(token, depth) {
  const items = (token.items ?? []).map((item) => {
    const box = item.task ? (item.checked ? "☑ " : "☐ ") : "";
    return html`<li>${box}${(item.tokens ?? []).filter((each) => each.type !== "checkbox").map((each) => block(each, depth + 1))}</li>`;
  });
  return token.ordered ? html`<ol start=${token.start || 1}>${items}</ol>` : html`<ul>${items}</ul>`;
}

/** @param {Token} token @param {number} depth */
function table(token, depth) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Table">
    <table>
      <thead><tr>${(token.header ?? []).map((cell) => html`<th scope="col">${inline(cell, depth)}</th>`)}</tr></thead>
      <tbody>${(token.rows ?? []).map((row) => html`<tr>${row.map((cell) => html`<td>${inline(cell, depth)}</td>`)}</tr>`)}</tbody>
    </table>
  </div>`;
}

/** @param {Token} parent @param {number} depth @returns {any} */
function inline(parent, depth) {
  if (depth > MOST_DEPTH || !parent.tokens) return withoutEntities(parent.text ?? parent.raw);
  return parent.tokens.map((token) => {
    switch (token.type) {
      case "strong":
        return html`<strong>${inline(token, depth + 1)}</strong>`;
      case "em":
        return html`<em>${inline(token, depth + 1)}</em>`;
      case "del":
        return html`<del>${inline(token, depth + 1)}</del>`;
      case "codespan":
        return html`<code>${withoutEntities(token.text ?? "")}</code>`;
      case "br":
        return html`<br />`;
      case "link":
        return link(token, depth);
      case "text":
        return token.tokens ? inline(token, depth + 1) : withoutEntities(token.text ?? token.raw);
      case "escape":
        return token.text;
      default:
        return token.raw;
    }
  });
}

/** @param {Token} token @param {number} depth */
function link(token, depth) {
  const href = safeLink(token.href);
  if (href === null) return token.raw;
  return html`<a href=${href} target="_blank" rel="noopener noreferrer">${inline(token, depth + 1)}</a>`;
}

/** @param {{text: string, language: string}} props */
function Code({ text, language }) {
  return html`<div class="code">
    <div class="code-head"><span>${language || "code"}</span><${Copy} text=${text} /></div>
    <pre tabindex="0"><code>${text}</code></pre>
  </div>`;
}
