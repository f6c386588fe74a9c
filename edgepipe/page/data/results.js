// What tasks that only look have printed: the plan of a model, the findings of doctor, the list of models.
import { useEffect, useState } from "../vendor/hooks.js";
import { act, get } from "./acting.js";

/** @typedef {import("./types.js").Task} Task */

/**
 * Run a task that changes nothing. Return what it printed, null until then, and the task.
 *
 * @param {string} kind
 * @param {string} model
 * @param {Task[]} tasks the node's tasks, as the stream reports them
 * @param {boolean} wanted
 * @param {unknown} again run it again when this value changes
 * @param {import("./types.js").Choices} [choices] of plans
 * @returns {{result: any, task: Task | undefined}}
 */
export function useResult(kind, model, tasks, wanted, again, choices = undefined) {
  const [id, setId] = useState("");
  const [result, setResult] = useState(/** @type {any} */ (null));
  useEffect(() => {
    if (wanted) void act("/ui/tasks", { kind, model, ...choices }).then(({ data }) => setId(data?.id ?? ""));
  }, [kind, model, wanted, again]);
  const task = tasks.find((each) => each.id === id);
  const state = task?.state ?? "";
  useEffect(() => {
    if (id && (state === "done" || state === "failed")) void get(`/ui/tasks/${id}`).then(({ data }) => setResult(data?.result ?? null));
  }, [id, state]);
  return { result, task };
}
