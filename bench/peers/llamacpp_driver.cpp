// llama.cpp's library behind JSON lines; one order a line on stdin, one answer a line on stdout.
//
//     llamacpp_driver MODEL.gguf THREADS SEQUENCES TOKENS_A_SEQUENCE
//
//     {"prompts": [[ids]], "output": n}   ->  {"seconds": s, "tokens": count, "steps": [[seconds since the start, tokens], ...]}
//     {"score": [[ids]]}                  ->  {"logprobs": [[one for every id but the first]]}
//
// All sequences of an order run together, one llama_decode a step, the likeliest token each: what its server does, without the
// server. Each kind of work gets the context that was fastest for it where we tried (x86 with AMX, 2 cores):
//
//     many     several sequences, each with cells of its own (kv_unified off: 2 to 3 times faster), flash attention off (1.5 times)
//     one      a sequence alone: a context divides its cells among its sequences; flash attention off (1.4 times)
//     prompt   nothing but a prompt (output 1): flash attention on (1.7 times)

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "ggml-cpu.h"
#include "llama.h"
#include "nlohmann/json.hpp"

using nlohmann::json;
using Ids = std::vector<llama_token>;

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void fail(const char * what) {
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

struct Engine {
    llama_context * context;
    llama_batch batch;
    int vocabulary;
    int room;

    Engine(llama_model * model, int threads, int sequences, int tokens, bool flash) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = sequences * tokens;
        params.n_batch = 2048;
        params.n_ubatch = 512;
        params.n_seq_max = sequences;
        params.n_threads = params.n_threads_batch = threads;
        params.kv_unified = false;
        params.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
        params.no_perf = true;
        context = llama_init_from_model(model, params);
        if (!context) fail("no context");
        room = params.n_batch;
        batch = llama_batch_init(room, 0, 1);
        vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    }

    void clear() {
        llama_memory_clear(llama_get_memory(context), false);
        batch.n_tokens = 0;
    }

    void add(llama_token token, int position, int sequence, bool wanted) {
        int i = batch.n_tokens++;
        batch.token[i] = token;
        batch.pos[i] = position;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequence;
        batch.logits[i] = wanted;
    }

    // Calls visit(sequence, position, logits) for every wanted row, and empties the batch.
    template <class Visit> void decode(Visit visit) {
        if (llama_decode(context, batch)) fail("llama_decode failed");
        for (int i = 0; i < batch.n_tokens; i++) {
            if (batch.logits[i]) visit(batch.seq_id[i][0], batch.pos[i], llama_get_logits_ith(context, i));
        }
        batch.n_tokens = 0;
    }

    llama_token likeliest(const float * row) const {
        return (llama_token) (std::max_element(row, row + vocabulary) - row);
    }
};

static json generate(Engine & engine, const std::vector<Ids> & prompts, int output) {
    const double begin = now();
    json steps = json::array();
    std::vector<llama_token> last(prompts.size());
    int found = 0, total = 0;
    auto take = [&](int sequence, int, const float * row) { last[sequence] = engine.likeliest(row); found++; };
    auto step = [&] {
        engine.decode(take);
        steps.push_back({now() - begin, found});
        total += found;
        found = 0;
    };
    engine.clear();
    for (size_t s = 0; s < prompts.size(); s++) {
        for (size_t p = 0; p < prompts[s].size(); p++) {
            if (engine.batch.n_tokens == engine.room) step();
            engine.add(prompts[s][p], (int) p, (int) s, p + 1 == prompts[s].size());
        }
    }
    step();
    for (int n = 1; n < output; n++) {
        for (size_t s = 0; s < prompts.size(); s++) engine.add(last[s], (int) prompts[s].size() + n - 1, (int) s, true);
        step();
    }
    return {{"seconds", now() - begin}, {"tokens", total}, {"steps", steps}};
}

static json score(Engine & engine, const std::vector<Ids> & texts) {
    json all = json::array();
    for (const Ids & ids : texts) {
        std::vector<double> found(ids.size() - 1);
        auto note = [&](int, int position, const float * row) {
            double top = *std::max_element(row, row + engine.vocabulary), sum = 0;
            for (int v = 0; v < engine.vocabulary; v++) sum += std::exp(row[v] - top);
            found[position] = row[ids[position + 1]] - top - std::log(sum);
        };
        engine.clear();
        for (size_t p = 0; p < ids.size(); p++) {
            if (engine.batch.n_tokens == engine.room) engine.decode(note);
            engine.add(ids[p], (int) p, 0, p + 1 < ids.size());
        }
        engine.decode(note);
        all.push_back(found);
    }
    return {{"logprobs", all}};
}

int main(int count, char ** words) {
    if (count != 5) fail("usage: llamacpp_driver MODEL.gguf THREADS SEQUENCES TOKENS_A_SEQUENCE");
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(words[1], llama_model_default_params());
    if (!model) fail("the model cannot be loaded");
    const int threads = std::atoi(words[2]), sequences = std::atoi(words[3]), tokens = std::atoi(words[4]);
    Engine many(model, threads, sequences, tokens, false);
    Engine one(model, threads, 1, llama_model_n_ctx_train(model), false);
    Engine prompt(model, threads, 1, llama_model_n_ctx_train(model), true);
    std::cout << json{{"ready", "llama.cpp"}, {"features", llama_print_system_info()}}.dump() << std::endl;
    for (std::string line; std::getline(std::cin, line);) {
        const json order = json::parse(line);
        if (order.contains("score")) {
            std::cout << score(prompt, order["score"].get<std::vector<Ids>>()).dump() << std::endl;
            continue;
        }
        const auto prompts = order["prompts"].get<std::vector<Ids>>();
        const int output = order["output"].get<int>();
        Engine & engine = prompts.size() > 1 ? many : output > 1 ? one : prompt;
        std::cout << generate(engine, prompts, output).dump() << std::endl;
    }
}
