// Server-sent events and comments from pieces of text, cut anywhere.

/** @typedef {{name: string, data: string} | {comment: string}} StreamPart */

export class EventReader {
  #rest = "";

  /**
   * Take the next piece of text; return the events and comments that are whole.
   *
   * @param {string} text
   * @returns {StreamPart[]}
   */
  push(text) {
    const blocks = (this.#rest + text).split("\n\n");
    this.#rest = blocks.pop() ?? "";
    return blocks.map(readBlock).filter((part) => part !== null);
  }
}

/**
 * @param {string} block
 * @returns {StreamPart | null}
 */
function readBlock(block) {
  let name = "message";
  let comment = "";
  /** @type {string[]} */
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith(":")) comment = line.slice(1).trim();
    else if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  if (data.length > 0) return { name, data: data.join("\n") };
  return comment ? { comment } : null;
}
