// What the referee asks llama.cpp: logits of all positions, and a file in another type. CPU alone, one thread.
//
//     referee logits    MODEL.gguf TOKENS.i32 LOGITS.f32    logits [tokens, vocabulary] of one pass, KV in float32
//     referee quantise  IN.gguf OUT.gguf FTYPE              FTYPE: a number of enum llama_ftype

#include "ggml-backend.h"
#include "llama.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static void quiet(ggml_log_level level, const char * text, void *) {
    if (level >= GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

static std::vector<llama_token> read_tokens(const char * path) {
    std::vector<llama_token> tokens;
    FILE * file = fopen(path, "rb");
    if (file == nullptr) {
        return tokens;
    }
    llama_token token;
    while (fread(&token, sizeof(token), 1, file) == 1) {
        tokens.push_back(token);
    }
    fclose(file);
    return tokens;
}

static int logits(const char * model_path, const char * tokens_path, const char * logits_path) {
    std::vector<llama_token> tokens = read_tokens(tokens_path);
    llama_model_params of_model = llama_model_default_params();
    of_model.n_gpu_layers = 0;
    llama_model * model = llama_model_load_from_file(model_path, of_model);
    if (model == nullptr || tokens.empty()) {
        return 1;
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 256;
    params.n_batch = params.n_ubatch = 256;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * context = llama_init_from_model(model, params);
    FILE * out = context == nullptr ? nullptr : fopen(logits_path, "wb");
    if (out == nullptr) {
        return 1;
    }
    llama_batch batch = llama_batch_init((int32_t) tokens.size(), 0, 1);
    batch.n_tokens = (int32_t) tokens.size();
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        batch.token[i] = tokens[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    if (llama_decode(context, batch) != 0) {
        return 1;
    }
    const size_t vocabulary = (size_t) llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        if (fwrite(llama_get_logits_ith(context, i), sizeof(float), vocabulary, out) != vocabulary) {
            return 1;
        }
    }
    return fclose(out);
}

static int quantise(const char * from, const char * to, int ftype) {
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.nthread = 1;
    params.ftype = (llama_ftype) ftype;
    params.allow_requantize = true;
    return (int) llama_model_quantize(from, to, &params);
}

int main(int argc, char ** argv) {
    llama_log_set(quiet, nullptr);
    ggml_backend_load_all();
    llama_backend_init();
    if (argc == 5 && strcmp(argv[1], "logits") == 0) {
        return logits(argv[2], argv[3], argv[4]);
    }
    if (argc == 5 && strcmp(argv[1], "quantise") == 0) {
        return quantise(argv[2], argv[3], atoi(argv[4]));
    }
    fputs("usage: referee logits MODEL TOKENS LOGITS | referee quantise IN OUT FTYPE\n", stderr);
    return 2;
}
