// Times llama.cpp on a GGUF file: node llama_cpp.mjs MODEL THREADS CONTEXT_TOKENS
// Reads one JSON command a line, answers each with {"seconds": s}:
//   {"decode": TOKENS, "prompt": TOKENS}  greedy tokens after the first one of a new prompt
//   {"prefill": TOKENS}                   one prompt, without logits
// The folder NODE_LLAMA_CPP holds the npm packages (scripts/llama_cpp.py installs them).
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const require = createRequire(process.env.NODE_LLAMA_CPP + "/package.json");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(require.resolve("node-llama-cpp")));

const [modelPath, threads, contextSize] = [process.argv[2], ...process.argv.slice(3).map(Number)];
const llama = await getLlama({ gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: threads });
const model = await llama.loadModel({ modelPath });
const context = await model.createContext({ contextSize, batchSize: contextSize, threads });
const sequence = context.getSequence();
const prompt = (count) => Array.from({ length: count }, (_, index) => 100 + (index * 37) % 150);

async function prefill(count) {
  const begun = performance.now();
  await sequence.evaluateWithoutGeneratingNewTokens(prompt(count));
  return performance.now() - begun;
}

async function decode(count, promptTokens) {
  let done = -1, begun = 0;
  for await (const _ of sequence.evaluate(prompt(promptTokens), { temperature: 0, yieldEogToken: true })) {
    if (done++ < 0) begun = performance.now(); // the prompt gives the first token
    if (done >= count) break;
  }
  return performance.now() - begun;
}

for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line);
  await sequence.clearHistory();
  const taken = command.decode ? await decode(command.decode, command.prompt) : await prefill(command.prefill);
  console.log(JSON.stringify({ seconds: taken / 1000 }));
}
process.exit(0);
