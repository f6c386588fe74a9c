// One message of a chat, with the figures of its answer.
import { html } from "../html.js";
import { Copy } from "../parts.js";
import { duration, layers, percent, rate, whole } from "../data/units.js";
import { Markdown } from "./markdown.js";

/**
 * @typedef {import("../data/answer.js").Message} Message
 * @typedef {import("../data/answer.js").Figures} Figures
 */

/**
 * @param {{message: Message, context: number, running: boolean, onEdit: (() => void) | null,
 *   onRegenerate: (() => void) | null}} props
 */
export function ChatMessage({ message, context, running, onEdit, onRegenerate }) {
  const own = message.role === "user";
  return html`<article class="message ${message.role}" aria-label=${own ? "You" : message.model || "Answer"}>
    ${message.reasoning
      ? html`<details class="reasoning">
          <summary>${running && !message.content ? "Thinking …" : "Reasoning"}</summary>
          <${Markdown} text=${message.reasoning} />
        </details>`
      : null}
    ${own ? html`<p class="plain">${message.content}</p>` : html`<${Markdown} text=${message.content} />`}
    ${message.error ? html`<p class="news bad" role="alert">${message.error}</p>` : null}
    ${message.figures && !running ? html`<${AnswerFigures} figures=${message.figures} context=${context} />` : null}
    ${running
      ? null
      : html`<div class="row">
          <${Copy} text=${message.content} />
          ${onEdit ? html`<button type="button" class="quiet" onClick=${onEdit}>Edit</button>` : null}
          ${onRegenerate ? html`<button type="button" class="quiet" onClick=${onRegenerate}>${own || message.error ? "Try again" : "Regenerate"}</button>` : null}
        </div>`}
  </article>`;
}

/** @param {{figures: Figures, context: number}} props */
function AnswerFigures({ figures, context }) {
  const used = figures.prompt_tokens + figures.tokens;
  const parts = [
    `${whole(figures.tokens)} token${figures.tokens === 1 ? "" : "s"}`,
    figures.tokens_per_s ? `${rate(figures.tokens_per_s)} tokens/s` : "",
    figures.first_word_s ? `first word after ${figures.first_word_s < 10 ? `${figures.first_word_s.toFixed(1)} s` : duration(figures.first_word_s)}` : "",
    context ? `context ${whole(used)} of ${whole(context)} (${percent(used / context)})` : "",
    figures.finish === "length" ? "cut: the limit of tokens was reached" : "",
  ];
  return html`<p class="quiet figures-line">
    ${parts.filter(Boolean).join(" · ")}
    ${figures.rings.map((ring, index) => html`<br />${index ? "then, after a change of the ring: " : "computed by "}${ring.stages.map((stage) => `${stage.machine} (${layers(stage.layers)})`).join(" → ")}`)}
  </p>`;
}
