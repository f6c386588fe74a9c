// One request for a chat answer: its stream, and the figures that are measured on the way.
import { authorization } from "./access.js";
import { EventReader } from "./events.js";

/**
 * @typedef {{machine: string, layers: string}} RingStage
 * @typedef {{epoch: number, stages: RingStage[]}} Ring
 *
 * @typedef {{tokens: number, prompt_tokens: number, tokens_per_s: number, first_word_s: number, rings: Ring[],
 *   finish: string}} Figures
 * `tokens_per_s`: from the first token to the last; 0 for a single token.
 *
 * @typedef {{role: "user" | "assistant", content: string, reasoning?: string, figures?: Figures, error?: string,
 *   model?: string}} Message
 *
 * @typedef {{system: string, temperature: string, top_p: string, max_tokens: string, seed: string}} Settings
 * As typed; an empty text leaves the choice to the model.
 */

/** @type {Settings} */
export const NO_SETTINGS = { system: "", temperature: "", top_p: "", max_tokens: "", seed: "" };

/** @type {Record<Exclude<keyof Settings, "system">, {least: number, most: number, step: number, words: string}>} */
export const BOUNDS = {
  temperature: { least: 0, most: 2, step: 0.05, words: "Temperature" },
  top_p: { least: 0.01, most: 1, step: 0.01, words: "Top p" },
  max_tokens: { least: 1, most: 1_000_000, step: 1, words: "Most tokens of an answer" },
  seed: { least: 0, most: 2 ** 53 - 1, step: 1, words: "Seed" },
};

/**
 * Return the body of a request. Values out of bounds are left out.
 *
 * @param {string} model
 * @param {Message[]} messages
 * @param {Settings} settings
 */
export function requestBody(model, messages, settings) {
  /** @type {Record<string, unknown>} */
  const body = { model, stream: true, stream_options: { include_usage: true } };
  for (const [name, { least, most }] of Object.entries(BOUNDS)) {
    const text = settings[/** @type {keyof typeof BOUNDS} */ (name)].trim();
    const value = Number(text);
    if (text !== "" && value >= least && value <= most) body[name] = value;
  }
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const sent = messages
    .filter((message) => message.role === "user" || message.content || message.reasoning)
    .map(({ role, content, reasoning }) => ({ role, content, ...(reasoning ? { reasoning_content: reasoning } : {}) }));
  return { ...body, messages: [...system, ...sent] };
}

/** Builds a message from the events of a stream. Times are in milliseconds. */
export class AnswerReader {
  /** @type {Message} */
  message;
  status = "";
  #begunMs;
  #firstMs = 0;
  #lastMs = 0;
  #reader = new EventReader();

  /** @param {string} model @param {number} nowMs */
  constructor(model, nowMs) {
    this.message = { role: "assistant", content: "", model };
    this.#begunMs = nowMs;
  }

  /** @param {string} text @param {number} nowMs */
  push(text, nowMs) {
    for (const part of this.#reader.push(text)) {
      if ("comment" in part) this.status = part.comment === "still working" ? this.status : part.comment;
      else if (part.data !== "[DONE]") this.#take(JSON.parse(part.data), nowMs);
    }
  }

  /** @param {any} chunk @param {number} nowMs */
  #take(chunk, nowMs) {
    const message = this.message;
    if (chunk.error) message.error = chunk.error.message;
    const choice = chunk.choices?.[0];
    const { content = "", reasoning_content: thought = "" } = choice?.delta ?? {};
    if (content || thought) {
      this.#firstMs ||= nowMs;
      this.#lastMs = nowMs;
      this.status = "";
      message.content += content;
      if (thought) message.reasoning = (message.reasoning ?? "") + thought;
    }
    if (choice?.finish_reason) message.figures = { ...this.#figures(), finish: choice.finish_reason };
    if (chunk.usage) {
      const { completion_tokens: tokens, prompt_tokens } = chunk.usage;
      message.figures = { ...this.#figures(), ...message.figures, tokens, prompt_tokens };
      const seconds = (this.#lastMs - this.#firstMs) / 1000;
      message.figures.tokens_per_s = tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : 0;
    }
    if (chunk.edgepipe) message.figures = { ...this.#figures(), ...message.figures, rings: chunk.edgepipe.rings };
  }

  /** @returns {Figures} */
  #figures() {
    const first_word_s = this.#firstMs ? (this.#firstMs - this.#begunMs) / 1000 : 0;
    return { tokens: 0, prompt_tokens: 0, tokens_per_s: 0, first_word_s, rings: [], finish: "" };
  }
}

/**
 * Ask for an answer and report it as it grows. Resolves at its end; a refusal or a broken stream is its `error`.
 *
 * @param {ReturnType<typeof requestBody> & {model?: unknown}} body
 * @param {AbortSignal} signal
 * @param {(reader: AnswerReader) => void} onChange
 */
export async function ask(body, signal, onChange) {
  const reader = new AnswerReader(String(body.model), performance.now());
  try {
    const headers = { ...authorization(), "Content-Type": "application/json", "X-Edgepipe-Details": "1" };
    const answer = await fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!answer.ok || answer.body === null) {
      const problem = await answer.json().catch(() => null);
      reader.message.error = problem?.error?.message ?? `the node answered with status ${answer.status}`;
    } else {
      const pieces = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let piece = await pieces.read(); !piece.done; piece = await pieces.read()) {
        reader.push(piece.value, performance.now());
        onChange(reader);
      }
      if (!reader.message.figures && !reader.message.error) reader.message.error = "the connection broke in mid-answer";
    }
  } catch {
    if (!signal.aborted) reader.message.error = "the node does not answer";
  }
  onChange(reader);
}
