// Chat without a browser: Markdown that grows, answers from streams, files of chats.
import assert from "node:assert/strict";
import { test } from "node:test";
import { AnswerReader, NO_SETTINGS, requestBody } from "../../edgepipe/page/data/answer.js";
import { exported, imported } from "../../edgepipe/page/data/chats.js";
import { GrowingMarkdown, safeLink, withoutEntities } from "../../edgepipe/page/data/markdown.js";
import { lexer } from "../../edgepipe/page/vendor/marked.js";

const TEXT = [
  "# Title",
  "A paragraph with `code`, **bold**\nand a [link](https://example.org).",
  "- one\n- two\n  - inner\n\n- three",
  "```py\nx = 1\n\n\ny = 2\n```",
  "| a | b |\n|---|---|\n| 1 | 2 |",
  "> quoted\n> text",
  "1. first\n2. second",
  "Heading below\n---",
  "The end.",
].join("\n\n");

test("blocks of a growing text are those of the whole text", () => {
  const plain = (tokens) => tokens.filter((token) => token.type !== "space").map((token) => [token.type, token.raw.trim()]);
  for (let size = 1; size < 60; size += 1) {
    const reader = new GrowingMarkdown();
    let read = reader.read("");
    for (let end = size; end < TEXT.length + size; end += size) read = reader.read(TEXT.slice(0, end));
    assert.deepEqual(plain([...read.done, ...read.open]), plain(lexer(TEXT)), `pieces of ${size}`);
  }
});

test("finished blocks stay the same objects, and another text begins anew", () => {
  const reader = new GrowingMarkdown();
  const { done: before } = reader.read("one\n\ntwo\n\nthr");
  const { done: after } = reader.read("one\n\ntwo\n\nthree\n\nfour");
  assert.ok(before.length > 0 && after.length > before.length);
  assert.equal(after[0], before[0]);
  assert.deepEqual(reader.read("other").done, []);
});

test("only links of the web can be followed", () => {
  assert.equal(safeLink("https://example.org/a"), "https://example.org/a");
  for (const href of ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", "file:///etc/passwd", "//x", "x", undefined]) {
    assert.equal(safeLink(href), null, String(href));
  }
});

test("entities that models write are shown as their characters, once", () => {
  assert.equal(withoutEntities("a &lt; b &amp;&amp; c &amp;lt; &euro;"), "a < b && c &lt; &euro;");
});

const chunk = (value) => `data: ${JSON.stringify(value)}\n\n`;
const delta = (fields, finish_reason = null) => chunk({ choices: [{ index: 0, delta: fields, finish_reason }] });

test("an answer has its text, its reasoning, its figures and its machines", () => {
  const reader = new AnswerReader("m", 1000);
  reader.push(": reading 60 %\n\n", 1500);
  assert.equal(reader.status, "reading 60 %");
  reader.push(delta({ role: "assistant", content: "" }), 1600);
  reader.push(delta({ reasoning_content: "hm" }) + delta({ content: "Par" }), 3000);
  assert.equal(reader.status, "");
  reader.push(delta({ content: "is" }) + delta({}, "stop"), 5000);
  const rings = [{ epoch: 1, stages: [{ machine: "pc", layers: "0-6" }] }];
  reader.push(chunk({ choices: [], usage: { prompt_tokens: 10, completion_tokens: 5 }, edgepipe: { rings } }), 5001);
  reader.push("data: [DONE]\n\n", 5002);
  assert.deepEqual(reader.message, {
    role: "assistant",
    model: "m",
    content: "Paris",
    reasoning: "hm",
    figures: { tokens: 5, prompt_tokens: 10, tokens_per_s: 2, first_word_s: 2, rings, finish: "stop" },
  });
});

test("an error in a stream is the message's", () => {
  const reader = new AnswerReader("m", 0);
  reader.push(delta({ content: "a" }) + chunk({ error: { message: "the ring broke" } }), 1);
  assert.equal(reader.message.error, "the ring broke");
});

test("a request has the settings that are within bounds, and earlier answers with their reasoning", () => {
  const messages = [
    { role: "user", content: "q" },
    { role: "assistant", content: "a", reasoning: "r", error: "x" },
    { role: "user", content: "again" },
    { role: "assistant", content: "", error: "failed" },
  ];
  const settings = { ...NO_SETTINGS, system: "be brief", temperature: "0", top_p: "7", max_tokens: " 20 ", seed: "x" };
  assert.deepEqual(requestBody("m", messages, settings), {
    model: "m",
    stream: true,
    stream_options: { include_usage: true },
    temperature: 0,
    max_tokens: 20,
    messages: [
      { role: "system", content: "be brief" },
      { role: "user", content: "q" },
      { role: "assistant", content: "a", reasoning_content: "r" },
      { role: "user", content: "again" },
    ],
  });
});

test("an export comes back, and a strange file brings nothing in", () => {
  const chat = {
    id: "1",
    title: "t",
    changed_ms: 5,
    model: "m",
    settings: { ...NO_SETTINGS, seed: "3" },
    messages: [{ role: "user", content: "q" }, { role: "assistant", content: "a", reasoning: "r" }],
  };
  const [back] = imported(exported([chat]));
  assert.notEqual(back.id, chat.id);
  assert.deepEqual({ ...back, id: "1" }, chat);
  for (const text of ["", "{", "[]", '{"chats":3}', '{"chats":[{"messages":"x"},null,7]}']) assert.deepEqual(imported(text), []);
  const [odd] = imported('{"chats":[{"title":{"a":1},"messages":[{"role":"system","content":"x"},{"role":"user","content":[1]}]}]}');
  assert.deepEqual([odd.title, odd.messages], ["", [{ role: "user", content: "" }]]);
});
