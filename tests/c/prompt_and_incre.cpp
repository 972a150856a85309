/*
 * The attention operators of inference cards in C++: PromptFlashAttention V3 and V1, IncreFlashAttention V4 and V1. Prints
 * their outputs. The first versions take a position bias and compute without it.
 *
 * BNSD, half precision, 2 query heads on 1 key head, 3 queries (1 of IncreFlashAttention), 5 keys, head dimension 16.
 * Element i of the tensor with seed s is ((37 i + 101 s) mod 65) / 32 - 1.
 */
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "acl/acl.h"
#include "aclnn/acl_meta.h"
#include "aclnnop/aclnn_incre_flash_attention.h"
#include "aclnnop/aclnn_incre_flash_attention_v4.h"
#include "aclnnop/aclnn_prompt_flash_attention.h"
#include "aclnnop/aclnn_prompt_flash_attention_v3.h"

namespace {

const int64_t kHeads = 2;
const int64_t kQueries = 3;
const int64_t kKeys = 5;
const int64_t kDim = 16;
const int64_t kAllTokens = 2147483647;

void Check(int status, const char *what) {
    if (status != 0) {
        const char *text = aclGetRecentErrMsg();
        std::fprintf(stderr, "%s: %d: %s\n", what, status, text == nullptr ? "no message" : text);
        std::exit(1);
    }
}

/* Half precision [1, N, S, D] on the device. */
class Tensor {
public:
    Tensor(int64_t heads, int64_t rows, int64_t dim, int seed) : host_(heads * rows * dim) {
        for (std::size_t i = 0; i < host_.size(); ++i) {
            host_[i] = aclFloatToFloat16(static_cast<float>((i * 37 + seed * 101) % 65) / 32.0F - 1.0F);
        }
        const std::size_t bytes = host_.size() * sizeof(aclFloat16);
        Check(aclrtMalloc(&data_, bytes, ACL_MEM_MALLOC_HUGE_FIRST), "aclrtMalloc");
        Check(aclrtMemcpy(data_, bytes, host_.data(), bytes, ACL_MEMCPY_HOST_TO_DEVICE), "aclrtMemcpy");
        const int64_t shape[] = {1, heads, rows, dim};
        const int64_t strides[] = {heads * rows * dim, rows * dim, dim, 1};
        handle_ = aclCreateTensor(shape, 4, ACL_FLOAT16, strides, 0, ACL_FORMAT_ND, shape, 4, data_);
        Check(handle_ == nullptr ? 1 : 0, "aclCreateTensor");
    }
    Tensor(const Tensor &) = delete;
    Tensor &operator=(const Tensor &) = delete;
    ~Tensor() {
        if (!listed_) {
            Check(aclDestroyTensor(handle_), "aclDestroyTensor");
        }
        Check(aclrtFree(data_), "aclrtFree");
    }

    const aclTensor *Get() const { return handle_; }

    /* A list of this tensor, which then owns its description. */
    aclTensorList *List() {
        const aclTensor *members[] = {handle_};
        listed_ = true;
        return aclCreateTensorList(members, 1);
    }

    void Print(std::size_t first) {
        const std::size_t bytes = host_.size() * sizeof(aclFloat16);
        Check(aclrtMemcpy(host_.data(), bytes, data_, bytes, ACL_MEMCPY_DEVICE_TO_HOST), "aclrtMemcpy");
        for (std::size_t i = 0; i < host_.size(); ++i) {
            std::printf("out %zu %.9g\n", first + i, static_cast<double>(aclFloat16ToFloat(host_[i])));
        }
    }

private:
    std::vector<aclFloat16> host_;
    void *data_ = nullptr;
    aclTensor *handle_ = nullptr;
    bool listed_ = false;
};

typedef aclnnStatus (*PhaseTwo)(void *, uint64_t, aclOpExecutor *, aclrtStream);

void Launch(PhaseTwo two, uint64_t bytes, aclOpExecutor *executor, aclrtStream stream) {
    void *workspace = nullptr;
    if (bytes > 0) {
        Check(aclrtMalloc(&workspace, bytes, ACL_MEM_MALLOC_HUGE_FIRST), "aclrtMalloc");
    }
    Check(two(workspace, bytes, executor, stream), "phase two");
    Check(aclrtSynchronizeStream(stream), "aclrtSynchronizeStream");
    if (workspace != nullptr) {
        Check(aclrtFree(workspace), "aclrtFree");
    }
}

void Prompt(aclrtStream stream) {
    char layout[] = "BNSD";
    Tensor query(kHeads, kQueries, kDim, 1);
    Tensor key(1, kKeys, kDim, 2);
    Tensor value(1, kKeys, kDim, 3);
    Tensor bias(kHeads, kQueries, kKeys, 4);
    uint64_t bytes = 0;
    aclOpExecutor *executor = nullptr;
    Tensor newest(kHeads, kQueries, kDim, 9);
    Check(aclnnPromptFlashAttentionV3GetWorkspaceSize(
              query.Get(), key.Get(), value.Get(), nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
              nullptr, kHeads, 0.25, kAllTokens, kAllTokens, layout, 1, 0, 0, newest.Get(), &bytes, &executor),
          "aclnnPromptFlashAttentionV3GetWorkspaceSize");
    Launch(aclnnPromptFlashAttentionV3, bytes, executor, stream);
    newest.Print(0);
    Tensor oldest(kHeads, kQueries, kDim, 9);
    Check(aclnnPromptFlashAttentionGetWorkspaceSize(query.Get(), key.Get(), value.Get(), bias.Get(), nullptr, nullptr,
                                                    kHeads, 0.25, kAllTokens, kAllTokens, layout, 1, oldest.Get(),
                                                    &bytes, &executor),
          "aclnnPromptFlashAttentionGetWorkspaceSize");
    Launch(aclnnPromptFlashAttention, bytes, executor, stream);
    oldest.Print(kHeads * kQueries * kDim);
}

void Incre(aclrtStream stream) {
    char layout[] = "BNSD";
    Tensor query(kHeads, 1, kDim, 1);
    Tensor key(1, kKeys, kDim, 2);
    Tensor value(1, kKeys, kDim, 3);
    Tensor bias(kHeads, 1, kKeys, 4);
    aclTensorList *keys = key.List();
    aclTensorList *values = value.List();
    uint64_t bytes = 0;
    aclOpExecutor *executor = nullptr;
    const std::size_t first = 2 * kHeads * kQueries * kDim;
    Tensor newest(kHeads, 1, kDim, 9);
    Check(aclnnIncreFlashAttentionV4GetWorkspaceSize(
              query.Get(), keys, values, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
              nullptr, nullptr, nullptr, kHeads, 0.25, layout, 1, 0, 1, newest.Get(), &bytes, &executor),
          "aclnnIncreFlashAttentionV4GetWorkspaceSize");
    Launch(aclnnIncreFlashAttentionV4, bytes, executor, stream);
    newest.Print(first);
    Tensor oldest(kHeads, 1, kDim, 9);
    Check(aclnnIncreFlashAttentionGetWorkspaceSize(query.Get(), keys, values, bias.Get(), nullptr, nullptr, kHeads, 0.25,
                                                   layout, 1, oldest.Get(), &bytes, &executor),
          "aclnnIncreFlashAttentionGetWorkspaceSize");
    Launch(aclnnIncreFlashAttention, bytes, executor, stream);
    oldest.Print(first + kHeads * kDim);
    Check(aclDestroyTensorList(keys), "aclDestroyTensorList");
    Check(aclDestroyTensorList(values), "aclDestroyTensorList");
}

}  // namespace

int main() {
    aclrtStream stream = nullptr;
    Check(aclInit(nullptr), "aclInit");
    Check(aclrtSetDevice(0), "aclrtSetDevice");
    Check(aclrtCreateStream(&stream), "aclrtCreateStream");
    Prompt(stream);
    Incre(stream);
    Check(aclrtDestroyStream(stream), "aclrtDestroyStream");
    Check(aclrtResetDevice(0), "aclrtResetDevice");
    Check(aclFinalize(), "aclFinalize");
    std::printf("done\n");
    return 0;
}
