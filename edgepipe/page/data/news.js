// What a person should know now: recovery, machines that are away, what is left out.
import { clock, duration, percent } from "./units.js";

/**
 * @typedef {import("./types.js").View} View
 * @typedef {import("./types.js").Model} Model
 * @typedef {import("./types.js").Absent} Absent
 * @typedef {{level: "bad" | "warn" | "info", text: string}} News
 */

/** @type {Record<string, string>} */
const AWAY = { asleep: "asleep", dead: "gone", left: "stopped", unseen: "not seen" };

/** @param {Absent} node @param {number} now_s */
export function awayText(node, now_s) {
  return `${node.name} is ${AWAY[node.state] ?? node.state} since ${clock(node.since_s, now_s)}`;
}

/** @param {Model} model @param {number} now_s @returns {News[]} */
export function modelNews(model, now_s) {
  /** @type {News[]} */
  const news = [];
  if (model.state === "recovering") {
    news.push({ level: "warn", text: `Recovering: ${model.message || "the ring is built again"}. Answers go on after it.` });
  } else if (model.error !== null && (model.state === "failed" || model.state === "waiting")) {
    news.push({ level: "bad", text: [model.error.what, model.error.fact, model.error.next_step].filter(Boolean).join(". ") });
  } else if (model.state !== "ready") {
    const progress = model.progress > 0 && model.progress < 1 ? ` ${percent(model.progress)}` : "";
    news.push({ level: "info", text: `${model.message || model.state}${progress}` });
  }
  if (model.starts_at_s > now_s) {
    news.push({ level: "warn", text: `The engine starts again in ${duration(model.starts_at_s - now_s)}.` });
  }
  for (const each of model.left_out) {
    const subject = each.link_to ? `The link from ${each.machine} to ${each.link_to}` : each.machine;
    news.push({ level: "warn", text: `${subject} is left out for a while: ${each.reason}` });
  }
  return news;
}

/** @param {View} view @param {number} now_s @returns {News[]} */
export function clusterNews(view, now_s) {
  const away = view.absent.map((node) => awayText(node, now_s));
  const suspects = view.machines
    .filter((machine) => machine.state !== "alive")
    .map((machine) => `${machine.name} does not answer`);
  return [...suspects, ...away].map((text) => ({ level: "warn", text: `${text}.` }));
}
