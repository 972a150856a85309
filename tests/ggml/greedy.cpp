// A language model through llama.cpp on one device: decodes greedily and prints the numbers of the tokens, a line for
// each prompt.
//
//   greedy convert MODEL TYPE OUTPUT             writes the model's weights as f16, q8_0 or q4_0
//   greedy decode MODEL DEVICE TOKENS PROMPT...  DEVICE is what ggml calls it: CPU, CANN0
//
// On a device other than the CPU it tells on stderr how many operations ran there and which ran elsewhere, and fails
// unless attention ran there. The end of a text ends nothing: each line has as many tokens as are asked for.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

namespace {

[[noreturn]] void fail(const std::string & what) {
    std::fprintf(stderr, "greedy: %s\n", what.c_str());
    std::exit(1);
}

// Where the operations of a graph ran, by the device that holds their results.
struct Places {
    ggml_backend_dev_t         device;
    std::map<std::string, int> there, elsewhere;
};

// Asked before each operation whether its result is to be looked at: it never is, so that the graph runs as it would.
bool note_place(ggml_tensor * tensor, bool, void * data) {
    auto & places = *static_cast<Places *>(data);
    const bool computes = tensor->op != GGML_OP_NONE && tensor->op != GGML_OP_RESHAPE && tensor->op != GGML_OP_VIEW &&
                          tensor->op != GGML_OP_PERMUTE && tensor->op != GGML_OP_TRANSPOSE;
    if (computes && tensor->buffer != nullptr) {
        auto device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));
        ++(device == places.device ? places.there : places.elsewhere)[ggml_op_name(tensor->op)];
    }
    return false;
}

void tell(const char * where, const std::map<std::string, int> & operations) {
    std::fprintf(stderr, "%s:", where);
    for (const auto & [name, count] : operations) {
        std::fprintf(stderr, " %s %d", name.c_str(), count);
    }
    std::fprintf(stderr, "%s\n", operations.empty() ? " none" : "");
}

void convert(const std::string & model, const std::string & type, const std::string & output) {
    auto params             = llama_model_quantize_default_params();
    params.allow_requantize = true;
    params.pure             = true;
    if (type == "f16") {
        params.ftype = LLAMA_FTYPE_MOSTLY_F16;
    } else if (type == "q8_0") {
        params.ftype = LLAMA_FTYPE_MOSTLY_Q8_0;
    } else if (type == "q4_0") {
        params.ftype = LLAMA_FTYPE_MOSTLY_Q4_0;
    } else {
        fail("type " + type + " is none of f16, q8_0, q4_0");
    }
    if (llama_model_quantize(model.c_str(), output.c_str(), &params) != 0) {
        fail("cannot write " + model + " as " + type);
    }
}

std::vector<llama_token> tokens_of(const llama_vocab * vocab, const std::string & text) {
    const auto               length = static_cast<int32_t>(text.size());
    std::vector<llama_token> tokens(text.size() + 8);
    const auto capacity = static_cast<int32_t>(tokens.size());
    const int  count    = llama_tokenize(vocab, text.c_str(), length, tokens.data(), capacity, true, true);
    if (count <= 0) {
        fail("no tokens in the prompt: " + text);
    }
    tokens.resize(count);
    return tokens;
}

std::vector<llama_token> decode(llama_context * context, std::vector<llama_token> prompt, int count) {
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(context));
    llama_memory_clear(llama_get_memory(context), true);
    std::vector<llama_token> chosen;
    auto                     batch = llama_batch_get_one(prompt.data(), static_cast<int32_t>(prompt.size()));
    while (true) {
        if (llama_decode(context, batch) != 0) {
            fail("llama_decode failed");
        }
        const float * logits = llama_get_logits_ith(context, -1);
        const float * best   = std::max_element(logits, logits + llama_vocab_n_tokens(vocab));
        chosen.push_back(static_cast<llama_token>(best - logits));
        if (static_cast<int>(chosen.size()) == count) {
            return chosen;
        }
        batch = llama_batch_get_one(&chosen.back(), 1);
    }
}

void run(const std::string & path, const std::string & name, int count, const std::vector<std::string> & prompts) {
    auto device = ggml_backend_dev_by_name(name.c_str());
    if (device == nullptr || count < 1) {
        fail("there is no device " + name + ", or no token to decode");
    }
    const bool         on_cpu    = ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
    ggml_backend_dev_t devices[] = {on_cpu ? nullptr : device, nullptr};
    Places             places{device, {}, {}};

    auto model_params         = llama_model_default_params();
    model_params.devices      = devices;
    model_params.n_gpu_layers = on_cpu ? 0 : 999;
    llama_model * model       = llama_model_load_from_file(path.c_str(), model_params);
    if (model == nullptr) {
        fail("cannot load " + path);
    }
    auto context_params              = llama_context_default_params();
    context_params.n_ctx             = 512;
    // Threads of ggml wait for each other by spinning, which costs more than it brings where cores are shared.
    context_params.n_threads         = 1;
    context_params.n_threads_batch   = 1;
    context_params.flash_attn_type   = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    context_params.cb_eval           = note_place;
    context_params.cb_eval_user_data = &places;
    llama_context * context          = llama_init_from_model(model, context_params);
    if (context == nullptr) {
        fail("cannot make a context");
    }

    const llama_vocab * vocab = llama_model_get_vocab(model);
    for (const auto & prompt : prompts) {
        std::string text;
        for (llama_token token : decode(context, tokens_of(vocab, prompt), count)) {
            char      piece[256];
            const int length = llama_token_to_piece(vocab, token, piece, sizeof piece, 0, true);
            text.append(piece, std::max(length, 0));
            std::printf("%d ", token);
        }
        std::printf("\n");
        std::fflush(stdout);
        std::fprintf(stderr, "%s%s\n", prompt.c_str(), text.c_str());
    }
    if (!on_cpu) {
        tell(("operations on " + name).c_str(), places.there);
        tell("operations elsewhere", places.elsewhere);
    }
    const bool attended = on_cpu || places.there.count(ggml_op_name(GGML_OP_FLASH_ATTN_EXT)) != 0;
    llama_free(context);
    llama_model_free(model);
    if (!attended) {
        fail("attention did not run on " + name);
    }
}

}  // namespace

int main(int argc, char ** argv) {
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    // What llama.cpp and its backends say of themselves; their errors and warnings are kept.
    llama_log_set(
        [](ggml_log_level level, const char * text, void *) {
            if (level == GGML_LOG_LEVEL_ERROR || level == GGML_LOG_LEVEL_WARN) {
                std::fputs(text, stderr);
            }
        },
        nullptr);
    llama_backend_init();
    if (arguments.size() == 4 && arguments[0] == "convert") {
        convert(arguments[1], arguments[2], arguments[3]);
    } else if (arguments.size() >= 5 && arguments[0] == "decode") {
        run(arguments[1], arguments[2], std::atoi(arguments[3].c_str()),
            std::vector<std::string>(arguments.begin() + 4, arguments.end()));
    } else {
        fail("usage: greedy convert MODEL TYPE OUTPUT | greedy decode MODEL DEVICE TOKENS PROMPT...");
    }
    llama_backend_free();
    return 0;
}
