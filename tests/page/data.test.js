// Data of the page: streams cut anywhere, histories, texts for people.
import assert from "node:assert/strict";
import { test } from "node:test";
import { EventReader } from "../../edgepipe/page/data/events.js";
import { SECONDS, byMinute, withSample } from "../../edgepipe/page/data/history.js";
import { clusterNews, modelNews } from "../../edgepipe/page/data/news.js";
import { firstTokenS, phases, quantile, withRequests } from "../../edgepipe/page/data/requests.js";
import { EMPTY, after } from "../../edgepipe/page/data/state.js";
import { newestEnd, stageFigures, traceJson, withSteps } from "../../edgepipe/page/data/steps.js";
import { bytes, duration, layers, milliseconds, short } from "../../edgepipe/page/data/units.js";

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

test("a single layer is not shown as a range", () => {
  assert.deepEqual(["0-35", "63-63", "63", "0-3,8-8"].map(layers), ["layers 0-35", "layer 63", "layer 63", "layers 0-3,8"]);
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

test("requests that changed replace the ones before, newest first", () => {
  const row = (id, at_s, more = {}) => ({ id, at_s, queue_s: 1, prefill_s: 2, decode_s: null, whole_s: null, ...more });
  const before = withRequests([], [row("b", 2), row("a", 1)]);
  const now = withRequests(before, [row("a", 1, { whole_s: 5, decode_s: 2 }), row("c", 3)]);
  assert.deepEqual(now.map((each) => each.id), ["c", "b", "a"]);
  assert.equal(now[2].whole_s, 5);
  assert.equal(withRequests([], Array.from({ length: 500 }, (_, index) => row(`r${index}`, index))).length, 200);
});

test("the phases of a request last as long as the request", () => {
  const done = { at_s: 10, queue_s: 1, prefill_s: 2, decode_s: 4, whole_s: 7 };
  assert.deepEqual(phases(done, 99), [{ phase: "queue", seconds: 1 }, { phase: "prefill", seconds: 2 }, { phase: "decode", seconds: 4 }]);
  const reads = { at_s: 10, queue_s: 1, prefill_s: null, decode_s: null, whole_s: null };
  assert.deepEqual(phases(reads, 15), [{ phase: "queue", seconds: 1 }, { phase: "prefill", seconds: 4 }]);
  assert.deepEqual([firstTokenS(done), firstTokenS(reads)], [3, null]);
  const left = { at_s: 10, queue_s: null, prefill_s: null, decode_s: null, whole_s: 3 };
  assert.deepEqual(phases(left, 99), [{ phase: "queue", seconds: 3 }]);
});

test("a quantile leaves out what is not known", () => {
  assert.equal(quantile([null, 3, 1, 2], 0.5), 2);
  assert.equal(quantile([null], 0.5), null);
  assert.equal(quantile([1, 2], 1), 2);
});

const stepRow = (step, ...times) => [step, 3, 0, 2, step * 100, 5, ...times];

test("steps come once, in order, and another epoch begins anew", () => {
  let trace = withSteps({ model: "", epoch: 0, steps: [] }, { model: "m", epoch: 1, now_us: 0, steps: [stepRow(2, 200, 50, 260, 40), stepRow(1, 100, 50, 160, 40)] });
  trace = withSteps(trace, { model: "m", epoch: 1, now_us: 0, steps: [stepRow(2, 200, 50, 260, 40), stepRow(3, 300, 50, 360, 40)] });
  assert.deepEqual(trace.steps.map((step) => step.step), [1, 2, 3]);
  assert.deepEqual(trace.steps[0].spans, [{ begin: 100, length: 50 }, { begin: 160, length: 40 }]);
  assert.equal(newestEnd(trace.steps), 400);
  const [first, second] = stageFigures(trace.steps, 100, 400);
  assert.deepEqual([first.busy, first.step_ms, first.wait_ms], [0.5, 0.05, 0.05]);
  assert.equal(second.busy, 0.4);
  assert.deepEqual(withSteps(trace, { model: "m", epoch: 2, now_us: 0, steps: [] }).steps, []);
});

test("an exported trace has a thread for each stage and an event for each span", () => {
  const trace = withSteps({ model: "", epoch: 0, steps: [] }, { model: "m", epoch: 1, now_us: 0, steps: [stepRow(7, 700, 50, 760, 40)] });
  const { traceEvents } = JSON.parse(traceJson(trace, ["gamer", "studio"]));
  assert.deepEqual(traceEvents.map((each) => [each.ph, each.tid]), [["M", 0], ["M", 1], ["X", 0], ["X", 1]]);
  assert.deepEqual([traceEvents[3].ts, traceEvents[3].dur, traceEvents[3].cat], [760, 40, "micro-batch 1"]);
});

test("events add up, and a new connection begins with what the node knows", () => {
  let state = after(EMPTY, "requests", [{ id: "a", at_s: 1 }]);
  state = after(state, "tasks", [{ id: "t" }]);
  assert.deepEqual([state.requests.length, state.tasks.length], [1, 1]);
  state = after(state, "history", { models: {} });
  assert.deepEqual([state.requests.length, state.tasks.length], [0, 1]);
  assert.equal(after(state, "steps", null), state);
  assert.equal(after(state, "of another version", {}), state);
});
