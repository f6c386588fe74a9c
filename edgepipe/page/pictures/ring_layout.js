// Where the stages of a ring stand, and the ways between them.

export const CARD = { width: 236, height: 146 };
const GAP = { x: 118, y: 78 };
const PAD = 10;
const RETURN = 34; // room for the way back beside a row or a column

/**
 * @typedef {{x: number, y: number}} Point
 * @typedef {{path: string, label: Point, anchor: "middle" | "start"}} Edge
 * An edge leads from a stage to the next; the last one brings the token back to the first stage.
 * @typedef {{width: number, height: number, cards: Point[], edges: Edge[]}} RingLayout
 */

/**
 * Place `count` stages into `width`: in a row with the way back below, as a ring of two rows, or in a column.
 *
 * @param {number} count
 * @param {number} width
 * @returns {RingLayout}
 */
export function layoutRing(count, width) {
  if (count <= 3 && rowWidth(count) <= width) return row(count);
  const columns = Math.ceil(count / 2);
  return count > 2 && rowWidth(columns) <= width ? ring(count, columns) : column(count);
}

/** @param {number} columns */
function rowWidth(columns) {
  return columns * CARD.width + (columns - 1) * GAP.x + 2 * PAD;
}

/** @param {number} columnIndex */
function left(columnIndex) {
  return PAD + columnIndex * (CARD.width + GAP.x);
}

/** @param {number} count @returns {RingLayout} */
function row(count) {
  const cards = Array.from({ length: count }, (_, index) => ({ x: left(index), y: PAD }));
  const edges = cards.slice(1).map((card) => across(card.x - GAP.x, card.x, PAD + CARD.height / 2));
  const bottom = PAD + CARD.height;
  const [from, to] = [left(count - 1) + CARD.width / 2, PAD + CARD.width / 2];
  const path =
    count === 1
      ? `M ${from + 40} ${bottom} v ${RETURN - 14} h -80 V ${bottom + 4}`
      : `M ${from} ${bottom} v ${RETURN - 14} H ${to} V ${bottom + 4}`;
  edges.push({ path, label: { x: (from + to) / 2, y: bottom + RETURN - 2 }, anchor: "middle" });
  return { width: rowWidth(count), height: bottom + RETURN + 6, cards, edges };
}

/** @param {number} count @param {number} columns @returns {RingLayout} */
function ring(count, columns) {
  const lower = PAD + CARD.height + GAP.y;
  const cards = Array.from({ length: count }, (_, index) =>
    index < columns ? { x: left(index), y: PAD } : { x: left(2 * columns - 1 - index), y: lower },
  );
  /** @type {Edge[]} */
  const edges = [];
  for (let index = 1; index < columns; index += 1) {
    edges.push(across(left(index) - GAP.x, left(index), PAD + CARD.height / 2));
  }
  const turn = left(columns - 1) + CARD.width / 2;
  edges.push({ ...down(turn, PAD + CARD.height, lower) });
  for (let index = columns + 1; index < count; index += 1) {
    const right = left(2 * columns - index);
    edges.push(across(right, right - GAP.x, lower + CARD.height / 2));
  }
  const middle = PAD + CARD.width / 2;
  const last = cards[count - 1] ?? { x: 0, y: 0 };
  const from = last.x === PAD ? `M ${middle} ${lower}` : `M ${last.x} ${lower + CARD.height / 2} H ${middle}`;
  const back = `${from} V ${PAD + CARD.height + 4}`;
  edges.push({ path: back, label: { x: middle + 8, y: lower - GAP.y / 2 }, anchor: "start" });
  return { width: rowWidth(columns), height: lower + CARD.height + PAD, cards, edges };
}

/** @param {number} count @returns {RingLayout} */
function column(count) {
  const step = CARD.height + GAP.y / 1.5;
  const cards = Array.from({ length: count }, (_, index) => ({ x: PAD + RETURN, y: PAD + index * step }));
  const middle = PAD + RETURN + CARD.width / 2;
  const edges = cards.slice(1).map((card) => down(middle, card.y - step + CARD.height, card.y));
  const [start, end] = [PAD + (count - 1) * step + CARD.height / 2, PAD + CARD.height / 2];
  const path =
    count === 1
      ? `M ${PAD + RETURN} ${end + 20} h -22 V ${end - 20} h 18`
      : `M ${PAD + RETURN} ${start} h -22 V ${end} h 18`;
  edges.push({ path, label: { x: PAD + RETURN - 17, y: end + CARD.height / 2 + 18 }, anchor: "start" });
  const height = 2 * PAD + (count - 1) * step + CARD.height;
  return { width: CARD.width + RETURN + 2 * PAD, height, cards, edges };
}

/** @param {number} from @param {number} to @param {number} y @returns {Edge} */
function across(from, to, y) {
  const end = to > from ? to - 4 : to + 4;
  return { path: `M ${from} ${y} H ${end}`, label: { x: (from + to) / 2, y: y - 24 }, anchor: "middle" };
}

/** @param {number} x @param {number} from @param {number} to @returns {Edge} */
function down(x, from, to) {
  return { path: `M ${x} ${from} V ${to - 4}`, label: { x: x + 8, y: (from + to) / 2 }, anchor: "start" };
}
