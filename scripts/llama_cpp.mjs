// Times llama.cpp on a GGUF file: node llama_cpp.mjs MODEL THREADS PROMPT_TOKENS TOKENS ROUNDS; prints one JSON line.
// The folder NODE_LLAMA_CPP holds the npm packages (scripts/bench_packed.py installs them).
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(process.env.NODE_LLAMA_CPP + "/package.json");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(require.resolve("node-llama-cpp")));

const [modelPath, threads, promptTokens, tokens, rounds] = [process.argv[2], ...process.argv.slice(3).map(Number)];
const llama = await getLlama({ gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: threads });
const model = await llama.loadModel({ modelPath });
const context = await model.createContext({
  contextSize: promptTokens + tokens + 64, batchSize: Math.max(512, promptTokens), threads,
});
const sequence = context.getSequence();
const text = "The river rose in the night and the people of the lower town carried what they could. ".repeat(200);
const prompt = model.tokenize(text).slice(0, promptTokens);
const prefill_s = [], decode_s = [];
for (let round = 0; round < rounds; round++) {
  await sequence.clearHistory();
  let begun = performance.now();
  await sequence.evaluateWithoutGeneratingNewTokens(prompt.slice(0, -1));
  prefill_s.push((performance.now() - begun) / 1000);
  await sequence.clearHistory();
  let count = -1;
  for await (const _ of sequence.evaluate(prompt.slice(0, 32), { temperature: 0, yieldEogToken: true })) {
    if (count++ < 0) begun = performance.now(); // the first token is not counted
    if (count >= tokens) break;
  }
  decode_s.push((performance.now() - begun) / 1000 / tokens);
}
console.log(JSON.stringify({
  prefill_tok_s: (promptTokens - 1) / Math.min(...prefill_s), decode_tok_s: 1 / Math.min(...decode_s),
}));
process.exit(0);
