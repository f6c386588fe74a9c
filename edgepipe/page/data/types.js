// Shapes of the events, as edgepipe/gateway/ui/view.py writes them.

/**
 * @typedef {{weights: number, kv_used: number, kv_free: number, other: number, free: number}} Memory
 * Bytes of a machine's devices by use.
 *
 * @typedef {{what: string, fact: string, next_step: string}} Problem
 * @typedef {{name: string, backend: string, state: string, error: Problem | null}} Device
 * @typedef {{model: string, source: string, bytes_done: number, bytes_total: number, copy: boolean}} Transfer
 *
 * @typedef {{id: string, name: string, self: boolean, state: string, rtt_ms: number, version: string,
 *   apart: boolean, platform: string, leaving: boolean, draining: boolean, disk_free_bytes: number, devices: Device[],
 *   memory: Memory, transfers: Transfer[]}} Machine
 *
 * @typedef {{id: string, name: string, state: string, since_s: number}} Absent
 *
 * @typedef {{machine: string, name: string, device: string, layers: string, num_layers: number,
 *   weight_bytes: number, kv_bytes: number, busy: number, step_ms: number, one_way_ms: number,
 *   upload_ms: number}} Stage
 *
 * @typedef {{machine: string, link_to: string, reason: string}} LeftOut
 *
 * @typedef {{name: string, title: string, names: string[], state: string, message: string, progress: number,
 *   error: Problem | null, starts_at_s: number, context: number, running: number, waiting: number,
 *   micro_batches: number, in_flight: number, why: string, bottleneck: string, tokens_per_s: number,
 *   predicted_tokens_per_s: number, latency_ms: number, kv_tokens: number, kv_used_tokens: number,
 *   epoch: number, recoveries: number, stall_ms: number, advice: string, left_out: LeftOut[],
 *   stages: Stage[]}} Model
 *
 * @typedef {{node: {name: string, version: string}, newest: string, machines: Machine[], absent: Absent[], models: Model[],
 *   loadable: string[]}} View
 * ``newest``: the newest version of edgepipe among the machines. ``apart``: more than one minor version behind it.
 *
 * @typedef {{id: string, kind: string, model: string, state: string, begun_s: number, ended_s: number, phase: string,
 *   bytes_done: number, bytes_total: number, error: string[]}} Task
 *
 * @typedef {{kv: string, context: number, concurrency: number, draft: string}} Choices
 * How to serve a model: options of `edgepipe serve`. 0 is the command's default.
 *
 * @typedef {{name: string, whole: boolean, bytes: number, self: boolean}} Holder
 * @typedef {{name: string, content: string, size_bytes: number, copies: number, holders: Holder[]}} Disk
 *
 * @typedef {{from: string, to: string, one_way_ms: number, bytes_per_s: number}} Link
 * @typedef {{at_s: number, links: Link[]}} Links
 *
 * @typedef {{id: string, model: string, state: string, end: string, at_s: number, prompt_tokens: number,
 *   output_tokens: number, queue_s: number | null, prefill_s: number | null, decode_s: number | null,
 *   whole_s: number | null, recovery_s: number, recovering: boolean, itl_s: number | null}} RequestRow
 * A phase that has not ended is null.
 *
 * @typedef {{begin: number, length: number}} Span
 * @typedef {{step: number, decode_rows: number, prompt_tokens: number, micro_batches: number, planned_us: number,
 *   used_blocks: number, spans: Span[]}} Step
 * @typedef {{model: string, epoch: number, steps: Step[]}} Trace
 *
 * @typedef {[number, number, number, number]} Sample
 * Tokens per second, the predicted rate, running and waiting sequences; one a second.
 */

export {};
