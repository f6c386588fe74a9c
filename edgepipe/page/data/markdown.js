// Markdown that grows: blocks that can no longer change are read once.
import { lexer } from "../vendor/marked.js";

/** @typedef {import("../vendor/marked.js").Token} Token */

export class GrowingMarkdown {
  /** @type {Token[]} */
  #done = [];
  #doneChars = 0;
  #text = "";

  /**
   * Return the blocks of a text. If it begins with the text of the last call, only its end is read again, and
   * finished blocks are the same objects as before.
   *
   * @param {string} text
   * @returns {{done: readonly Token[], open: Token[]}} finished blocks, and those that may change
   */
  read(text) {
    const plain = text.replace(/\r\n|\r/g, "\n");
    if (!plain.startsWith(this.#text)) {
      this.#done = [];
      this.#doneChars = 0;
    }
    this.#text = plain;
    const tokens = lexer(plain.slice(this.#doneChars), { gfm: true, breaks: false });
    const last = tokens.findLastIndex((token) => token.type !== "space");
    const finished = tokens.slice(0, Math.max(0, last));
    for (const token of finished) this.#doneChars += token.raw.length;
    if (finished.length > 0) this.#done = [...this.#done, ...finished];
    return { done: this.#done, open: tokens.slice(finished.length) };
  }
}

/**
 * Return the address of a link that may be followed: http and https only; null for others.
 *
 * @param {string | undefined} href
 */
export function safeLink(href) {
  try {
    const address = new URL(href ?? "");
    return address.protocol === "http:" || address.protocol === "https:" ? address.href : null;
  } catch {
    return null;
  }
}

const NAMED = new Map([["amp", "&"], ["lt", "<"], ["gt", ">"], ["quot", '"'], ["#39", "'"], ["nbsp", "\u00a0"]]);

/** Replace the entities that models write; text nodes show others as they are. @param {string} text */
export function withoutEntities(text) {
  return text.replace(/&(amp|lt|gt|quot|#39|nbsp);/g, (whole, name) => NAMED.get(name) ?? whole);
}
