// A causal attention call in C++ with the habits of existing programs: the members of tensor lists are destroyed and the
// lists leaked, the result of aclGetViewShape is freed with delete[], and a copy reads up to a page past a small
// allocation.
//
// BSND, half precision, 2 heads, 3 queries, 5 keys, head dimension 16, sparse mode 3. Elements as in two_phase.c.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "acl/acl.h"
#include "aclnn/acl_meta.h"
#include "aclnnop/aclnn_fused_infer_attention_score_v2.h"

namespace {

void check(int status, const char *what)
{
    if (status != 0) {
        const char *text = aclGetRecentErrMsg();
        std::fprintf(stderr, "%s: %d: %s\n", what, status, text == nullptr ? "no message" : text);
        std::exit(1);
    }
}

template <typename T>
void *upload(const std::vector<T> &host)
{
    void *device = nullptr;
    const size_t bytes = host.size() * sizeof(T);
    check(aclrtMalloc(&device, bytes, ACL_MEM_MALLOC_HUGE_FIRST), "aclrtMalloc");
    check(aclrtMemcpy(device, bytes, host.data(), bytes, ACL_MEMCPY_HOST_TO_DEVICE), "aclrtMemcpy");
    return device;
}

std::vector<aclFloat16> numbers(int64_t count, int seed)
{
    std::vector<aclFloat16> values;
    for (int64_t i = 0; i < count; ++i) {
        values.push_back(aclFloatToFloat16(static_cast<float>((i * 37 + seed * 101) % 65) / 32.0F - 1.0F));
    }
    return values;
}

aclTensor *describe(const std::vector<int64_t> &shape, aclDataType type, void *data)
{
    // Null strides: contiguous.
    aclTensor *tensor = aclCreateTensor(shape.data(), shape.size(), type, nullptr, 0, ACL_FORMAT_ND, shape.data(),
                                        shape.size(), data);
    if (tensor == nullptr) {
        check(1, "aclCreateTensor");
    }
    return tensor;
}

} // namespace

int main()
{
    const int64_t heads = 2, queries = 3, keys = 5, dim = 16, side = 2048;

    check(aclInit(nullptr), "aclInit");
    check(aclrtSetDevice(0), "aclrtSetDevice");
    aclrtStream stream = nullptr;
    check(aclrtCreateStream(&stream), "aclrtCreateStream");

    void *q_data = upload(numbers(queries * heads * dim, 4));
    void *k_data = upload(numbers(keys * heads * dim, 5));
    void *v_data = upload(numbers(keys * heads * dim, 6));
    std::vector<aclFloat16> host_out(queries * heads * dim, 0x5A5A);
    void *out_data = upload(host_out);
    std::vector<int8_t> triangle(side * side, 0);
    for (int64_t i = 0; i < side; ++i) {
        for (int64_t j = i + 1; j < side; ++j) {
            triangle[i * side + j] = 1;
        }
    }
    void *mask_data = upload(triangle);

    aclTensor *query = describe({1, queries, heads, dim}, ACL_FLOAT16, q_data);
    aclTensor *key = describe({1, keys, heads, dim}, ACL_FLOAT16, k_data);
    aclTensor *value = describe({1, keys, heads, dim}, ACL_FLOAT16, v_data);
    aclTensor *mask = describe({side, side}, ACL_INT8, mask_data);
    aclTensor *out = describe({1, queries, heads, dim}, ACL_FLOAT16, out_data);
    aclTensorList *key_list = aclCreateTensorList(&key, 1);
    aclTensorList *value_list = aclCreateTensorList(&value, 1);

    int64_t *view = nullptr;
    uint64_t rank = 0;
    check(aclGetViewShape(key, &view, &rank), "aclGetViewShape");
    std::printf("shape");
    for (uint64_t i = 0; i < rank; ++i) {
        std::printf(" %lld", static_cast<long long>(view[i]));
    }
    std::printf("\n");
    delete[] view;

    uint64_t workspace_size = 0;
    aclOpExecutor *executor = nullptr;
    char layout[] = "BSND";
    check(aclnnFusedInferAttentionScoreV2GetWorkspaceSize(
              query, key_list, value_list, nullptr, mask, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
              nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
              nullptr, nullptr, heads, 0.25, 2147483647, 2147483647, layout, heads, 3, 0, 0, 0, false, 0, 0, out,
              nullptr, &workspace_size, &executor),
          "aclnnFusedInferAttentionScoreV2GetWorkspaceSize");
    void *workspace = nullptr;
    if (workspace_size > 0) {
        check(aclrtMalloc(&workspace, workspace_size, ACL_MEM_MALLOC_HUGE_FIRST), "aclrtMalloc");
    }
    check(aclnnFusedInferAttentionScoreV2(workspace, workspace_size, executor, stream),
          "aclnnFusedInferAttentionScoreV2");
    check(aclrtSynchronizeStream(stream), "aclrtSynchronizeStream");

    // A copy of whole pages from an allocation of a few hundred bytes.
    std::vector<aclFloat16> page(4096 / sizeof(aclFloat16));
    check(aclrtMemcpy(page.data(), 4096, out_data, 4096, ACL_MEMCPY_DEVICE_TO_HOST), "aclrtMemcpy of a page");
    for (int64_t i = 0; i < queries * heads * dim; ++i) {
        std::printf("out %lld %.9g\n", static_cast<long long>(i), static_cast<double>(aclFloat16ToFloat(page[i])));
    }

    for (aclTensor *tensor : {query, key, value, mask, out}) {
        check(aclDestroyTensor(tensor), "aclDestroyTensor");
    }
    for (void *memory : {q_data, k_data, v_data, out_data, mask_data, workspace}) {
        check(aclrtFree(memory), "aclrtFree");
    }
    check(aclrtDestroyStream(stream), "aclrtDestroyStream");
    check(aclrtResetDevice(0), "aclrtResetDevice");
    check(aclFinalize(), "aclFinalize");
    std::printf("done\n");
    return 0;
}
