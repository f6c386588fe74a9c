// Steps of an engine: which stage worked on which micro-batch, and when. Times are microseconds of the engine's clock.

/**
 * @typedef {import("./types.js").Step} Step
 * @typedef {import("./types.js").Trace} Trace
 */

export const MOST = 4096;

/** @param {number[]} row as edgepipe/gateway/ui/steps.py writes it @returns {Step} */
function read(row) {
  const [step = 0, decode_rows = 0, prompt_tokens = 0, micro_batches = 1, planned_us = 0, used_blocks = 0, ...times] = row;
  const spans = [];
  for (let index = 0; index + 1 < times.length; index += 2) spans.push({ begin: times[index] ?? 0, length: times[index + 1] ?? 0 });
  return { step, decode_rows, prompt_tokens, micro_batches: Math.max(1, micro_batches), planned_us, used_blocks, spans };
}

/**
 * Return the trace with the steps of an event. Another epoch or model begins anew.
 *
 * @param {Trace} before
 * @param {{model: string, epoch: number, now_us: number, steps: number[][]}} event
 * @returns {Trace}
 */
export function withSteps(before, event) {
  const same = before.model === event.model && before.epoch === event.epoch;
  const rows = new Map((same ? before.steps : []).map((step) => [step.step, step]));
  for (const row of event.steps.map(read)) rows.set(row.step, row);
  const steps = [...rows.values()].sort((a, b) => a.step - b.step).slice(-MOST);
  return { model: event.model, epoch: event.epoch, steps };
}

/**
 * Return the end of the newest work.
 *
 * @param {Step[]} steps
 */
export function newestEnd(steps) {
  return steps.reduce((end, step) => step.spans.reduce((most, span) => Math.max(most, span.begin + span.length), end), 0);
}

/**
 * Return per stage the busy share of a window, the median work of a step, and the longest wait between two steps.
 *
 * @param {Step[]} steps
 * @param {number} begin
 * @param {number} end
 */
export function stageFigures(steps, begin, end) {
  const count = steps[0]?.spans.length ?? 0;
  return Array.from({ length: count }, (_, stage) => {
    const spans = steps
      .map((step) => step.spans[stage] ?? { begin: 0, length: 0 })
      .filter((span) => span.begin + span.length > begin && span.begin < end)
      .sort((a, b) => a.begin - b.begin);
    const busy = spans.reduce((sum, span) => sum + Math.min(end, span.begin + span.length) - Math.max(begin, span.begin), 0);
    const lengths = spans.map((span) => span.length).sort((a, b) => a - b);
    const waits = spans.slice(1).map((span, index) => {
      const before = spans[index] ?? span;
      return span.begin - before.begin - before.length;
    });
    return {
      busy: end > begin ? Math.min(1, busy / (end - begin)) : 0,
      step_ms: (lengths[Math.floor(lengths.length / 2)] ?? 0) / 1000,
      wait_ms: Math.max(0, ...waits) / 1000,
    };
  });
}

/**
 * Write the steps as a trace that chrome://tracing, Perfetto and speedscope read.
 *
 * @param {Trace} trace
 * @param {string[]} stages names of the machines
 */
export function traceJson(trace, stages) {
  const names = stages.map((name, stage) => ({ ph: "M", pid: 1, tid: stage, name: "thread_name", args: { name: `stage ${stage}: ${name}` } }));
  const events = trace.steps.flatMap((step) =>
    step.spans.map((span, stage) => ({
      ph: "X",
      pid: 1,
      tid: stage,
      name: step.prompt_tokens ? `step ${step.step}: prompt` : `step ${step.step}`,
      cat: `micro-batch ${step.step % step.micro_batches}`,
      ts: span.begin,
      dur: span.length,
      args: { decode_rows: step.decode_rows, prompt_tokens: step.prompt_tokens, used_blocks: step.used_blocks },
    })),
  );
  return JSON.stringify({ traceEvents: [...names, ...events], otherData: { model: trace.model, epoch: trace.epoch } });
}
