// Data of the page: streams cut anywhere, histories, texts for people.
import assert from "node:assert/strict";
import { test } from "node:test";
import { EventReader } from "../../edgepipe/page/data/events.js";
import { SECONDS, byMinute, withSample } from "../../edgepipe/page/data/history.js";
import { clusterNews, modelNews } from "../../edgepipe/page/data/news.js";
import { bytes, duration, milliseconds, short } from "../../edgepipe/page/data/units.js";

test("events are the same wherever the stream is cut", () => {
  const text = ': reading 60 %\n\nevent: view\ndata: {"a":1}\n\ndata: x\ndata: y\n\n: \n\ndata: [DONE]\n\n';
  const expected = [
    { comment: "reading 60 %" },
    { name: "view", data: '{"a":1}' },
    { name: "message", data: "x\ny" },
    { name: "message", data: "[DONE]" },
  ];
  for (let size = 1; size <= text.length; size += 1) {
    const reader = new EventReader();
    const parts = [];
    for (let at = 0; at < text.length; at += size) parts.push(...reader.push(text.slice(at, at + size)));
    assert.deepEqual(parts, expected);
  }
});

test("a history keeps 15 minutes of the served models only", () => {
  let history = { gone: [[1, 1, 1, 1]] };
  for (let second = 0; second < SECONDS + 5; second += 1) history = withSample(history, { m: [second, 0, 0, 0] });
  assert.deepEqual(Object.keys(history), ["m"]);
  assert.equal(history.m.length, SECONDS);
  assert.equal(history.m.at(-1)[0], SECONDS + 4);
});

test("minutes are means, the newest first", () => {
  const samples = Array.from({ length: 90 }, (_, second) => [second < 30 ? 1 : 3, 2, 0, 0]);
  assert.deepEqual(byMinute(samples), [
    { minutes: 0, tokens_per_s: 3, predicted: 2, running: 0 },
    { minutes: 1, tokens_per_s: 1, predicted: 2, running: 0 },
  ]);
});

test("numbers have units that people read", () => {
  assert.deepEqual([0, 999, 1000, 12_400_000_000, 999_600_000].map(bytes), ["0 B", "999 B", "1.0 kB", "12.4 GB", "1.0 GB"]);
  assert.deepEqual([0, 0.41, 24, 250, 1500].map(milliseconds), ["–", "0.41 ms", "24.0 ms", "250 ms", "1.5 s"]);
  assert.deepEqual([5, 90, 4000].map(duration), ["5 s", "2 min", "1 h 7 min"]);
  assert.equal(short("a-long-name", 6), "a-lon…");
});

const MODEL = { state: "ready", message: "", progress: 1, error: null, starts_at_s: 0, left_out: [] };

test("news say what recovers, what is away and what to type", () => {
  assert.deepEqual(modelNews(MODEL, 0), []);
  assert.match(modelNews({ ...MODEL, state: "recovering", message: "preparing 2 stages" }, 0)[0].text, /preparing 2 stages/);
  const error = { what: "no memory", fact: "2 GB are missing", next_step: "edgepipe stop" };
  assert.deepEqual(modelNews({ ...MODEL, state: "failed", error }, 0), [
    { level: "bad", text: "no memory. 2 GB are missing. edgepipe stop" },
  ]);
  const leftOut = { machine: "mac", link_to: "pc", reason: "a step hung" };
  assert.match(modelNews({ ...MODEL, left_out: [leftOut] }, 0)[0].text, /link from mac to pc .* a step hung/);
  const view = {
    machines: [{ name: "pc", state: "suspect" }, { name: "mac", state: "alive" }],
    absent: [{ name: "laptop", state: "asleep", since_s: 60 }],
  };
  const texts = clusterNews(view, 120).map((news) => news.text);
  assert.equal(texts[0], "pc does not answer.");
  assert.match(texts[1], /^laptop is asleep since \d\d:\d\d\.$/);
});
