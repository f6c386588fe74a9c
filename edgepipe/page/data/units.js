// Numbers as people read them.

const UNITS = ["B", "kB", "MB", "GB", "TB"];

/** @param {number} count */
export function bytes(count) {
  let unit = 0;
  let value = count;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value >= 99.5 || unit === 0 ? value.toFixed(0) : value.toFixed(1)} ${UNITS[unit]}`;
}

/** @param {number} value */
export function milliseconds(value) {
  if (!value) return "–";
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  return `${value >= 99.5 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(2)} ms`;
}

/** @param {number} share from 0 to 1 */
export function percent(share) {
  return `${Math.round(share * 100)} %`;
}

/** @param {number} value */
export function rate(value) {
  return value >= 99.5 ? value.toFixed(0) : value.toFixed(1);
}

/** @param {number} count */
export function whole(count) {
  return count.toLocaleString("en");
}

/** @param {number} seconds */
export function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

/** @param {number} wall_s @param {number} now_s */
export function clock(wall_s, now_s) {
  const date = new Date(wall_s * 1000);
  const time = `${String(date.getHours()).padStart(2, "0")}:${String(date.getMinutes()).padStart(2, "0")}`;
  if (Math.abs(now_s - wall_s) < 20 * 3600) return time;
  return `${date.toLocaleDateString("en", { weekday: "short" })} ${time}`;
}

/** @param {string} text @param {number} most */
export function short(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

/** Ranges such as "0-35", and "63-63" or "63" for a single layer. @param {string} ranges */
export function layers(ranges) {
  const each = ranges.split(",").map((range) => range.replace(/^(\d+)-\1$/, "$1"));
  return `layer${/^\d+$/.test(each.join(",")) ? "" : "s"} ${each.join(",")}`;
}
