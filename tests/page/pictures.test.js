// Layouts of the pictures: pure functions of data.
import assert from "node:assert/strict";
import { test } from "node:test";
import { layoutGantt } from "../../edgepipe/page/pictures/gantt.js";
import { layoutMemory, total, used } from "../../edgepipe/page/pictures/memory.js";
import { CARD, layoutRing } from "../../edgepipe/page/pictures/ring_layout.js";
import { slowest } from "../../edgepipe/page/pictures/ring.js";
import { layoutSpeed, scaleEnd } from "../../edgepipe/page/pictures/speed.js";

test("no two cards of a ring overlap, all are inside, and each stage has one way out", () => {
  for (let count = 1; count <= 12; count += 1) {
    for (const width of [300, 360, 620, 760, 1000, 1140, 2500]) {
      const { cards, edges, ...size } = layoutRing(count, width);
      assert.equal(cards.length, count);
      assert.equal(edges.length, count);
      for (const [index, card] of cards.entries()) {
        assert.ok(card.x >= 0 && card.x + CARD.width <= size.width, `${count} in ${width}`);
        assert.ok(card.y >= 0 && card.y + CARD.height <= size.height, `${count} in ${width}`);
        for (const other of cards.slice(index + 1)) {
          const apart = Math.abs(card.x - other.x) >= CARD.width || Math.abs(card.y - other.y) >= CARD.height;
          assert.ok(apart, `${count} in ${width}`);
        }
      }
      if (width >= 300) assert.ok(size.width <= Math.max(width, 300), `${count} in ${width} takes ${size.width}`);
    }
  }
});

test("a narrow screen gets a column, a wide one a row or a ring", () => {
  const xs = (count, width) => new Set(layoutRing(count, width).cards.map((card) => card.x)).size;
  assert.equal(xs(4, 340), 1);
  assert.equal(xs(4, 1140), 2);
  assert.equal(xs(3, 1140), 3);
});

test("the parts of memory fill the bar in order and keep their shares", () => {
  const memory = { weights: 50, kv_used: 10, kv_free: 0, other: 15, free: 25 };
  const parts = layoutMemory(memory, 200);
  assert.deepEqual(
    parts.map((part) => [part.use, part.x, part.width]),
    [
      ["weights", 0, 100],
      ["kv_used", 100, 20],
      ["other", 120, 30],
      ["free", 150, 50],
    ],
  );
  assert.equal(total(memory), 100);
  assert.equal(used(memory), 75);
  assert.deepEqual(layoutMemory({ weights: 0, kv_used: 0, kv_free: 0, other: 0, free: 0 }, 200), []);
});

test("the engine's word names the slowest stage or link", () => {
  assert.deepEqual(slowest("stage 2"), { stage: 2, edge: -1 });
  assert.deepEqual(slowest("link 0-1"), { stage: -1, edge: 0 });
  assert.deepEqual(slowest(""), { stage: -1, edge: -1 });
  assert.deepEqual(slowest("sampler"), { stage: -1, edge: -1 });
});

test("the scale ends at 1, 2 or 5 times a power of ten, not below the value", () => {
  assert.deepEqual([0, 0.3, 1, 17, 20, 42, 51].map(scaleEnd), [1, 0.5, 1, 20, 20, 50, 100]);
});

test("the newest sample is at the right edge and the highest at the top", () => {
  const layout = layoutSpeed([[0, 0, 0, 0], [10, 0, 1, 0]], 550, 170);
  const points = layout.speed.split(/[ML]/).filter(Boolean).map((point) => point.split(" ").map(Number));
  assert.equal(points.length, 2);
  assert.deepEqual(points[1], [544, 8]);
  assert.equal(layout.predicted, "", "without a prediction there is no dashed line");
  assert.equal(layoutSpeed([], 550, 170).speed, "");
});

test("bars of a chart are inside its window and its rows", () => {
  const steps = [1, 2, 3].map((step) => ({
    step, decode_rows: 1, prompt_tokens: step === 2 ? 64 : 0, micro_batches: 2, planned_us: 0, used_blocks: 0,
    spans: [{ begin: step * 100, length: 80 }, { begin: step * 100 + 90, length: 30 }],
  }));
  const bars = layoutGantt(steps, 150, 400, 500);
  assert.equal(bars.length, 6);
  for (const bar of bars) assert.ok(bar.x >= 96 && bar.x + bar.width <= 494.001 && bar.width >= 0.5);
  assert.deepEqual(bars.map((bar) => bar.prompt), [false, false, true, true, false, false]);
  assert.equal(new Set(bars.map((bar) => bar.y)).size, 2);
  assert.deepEqual(layoutGantt(steps, 5000, 6000, 500), []);
});
