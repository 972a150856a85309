/*
 * One attention call in C: both phases, every optional argument null. Prints the output and the log-sum-exp.
 *
 * BNSD, half precision, 2 query heads on 1 key head, 3 queries, 5 keys, head dimension 16. Element i of the tensor with
 * seed s is ((37 i + 101 s) mod 65) / 32 - 1.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "acl/acl.h"
#include "aclnn/acl_meta.h"
#include "aclnnop/aclnn_fused_infer_attention_score.h"

/* Other calls by the compiler's -D: a single row, a window without a mask, log-sum-exps described wrongly. */
#ifndef QUERIES
#define QUERIES 3
#endif
#ifndef PRE_TOKENS
#define PRE_TOKENS 2147483647
#endif
#ifndef LSE_ROWS
#define LSE_ROWS QUERIES
#endif

enum { HEADS = 2, KV_HEADS = 1, KEYS = 5, DIM = 16 };

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        int status_ = (int)(call);                                                                                     \
        if (status_ != 0) {                                                                                            \
            const char *text_ = aclGetRecentErrMsg();                                                                  \
            fprintf(stderr, "%s: %d: %s\n", #call, status_, text_ == NULL ? "no message" : text_);                     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static void *device_memory(size_t bytes)
{
    void *memory = NULL;
    CHECK(aclrtMalloc(&memory, bytes, ACL_MEM_MALLOC_HUGE_FIRST));
    return memory;
}

/* A tensor on the device whose elements follow from a seed. */
static void *filled(int64_t count, int seed)
{
    size_t bytes = (size_t)count * sizeof(aclFloat16);
    aclFloat16 *host = malloc(bytes);
    void *device = device_memory(bytes);
    if (host == NULL) {
        exit(1);
    }
    for (int64_t i = 0; i < count; ++i) {
        host[i] = aclFloatToFloat16((float)((i * 37 + seed * 101) % 65) / 32.0F - 1.0F);
    }
    CHECK(aclrtMemcpy(device, bytes, host, bytes, ACL_MEMCPY_HOST_TO_DEVICE));
    free(host);
    return device;
}

static aclTensor *describe(const int64_t *shape, aclDataType type, void *data)
{
    int64_t strides[4] = {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1};
    aclTensor *tensor = aclCreateTensor(shape, 4, type, strides, 0, ACL_FORMAT_ND, shape, 4, data);
    if (tensor == NULL) {
        fprintf(stderr, "aclCreateTensor: %s\n", aclGetRecentErrMsg());
        exit(1);
    }
    return tensor;
}

int main(void)
{
    int64_t q_shape[4] = {1, HEADS, QUERIES, DIM};
    int64_t kv_shape[4] = {1, KV_HEADS, KEYS, DIM};
    int64_t lse_shape[4] = {1, HEADS, LSE_ROWS, 1};
    const size_t out_bytes = HEADS * QUERIES * DIM * sizeof(aclFloat16);
    const size_t lse_bytes = HEADS * QUERIES * sizeof(float);
    char layout[] = "BNSD";
    aclrtStream stream = NULL;
    uint64_t workspace_size = 0;
    void *workspace = NULL;
    aclOpExecutor *executor = NULL;

    CHECK(aclInit(NULL));
    CHECK(aclrtSetDevice(0));
    CHECK(aclrtCreateStream(&stream));

    void *q_data = filled(HEADS * QUERIES * DIM, 1);
    void *k_data = filled(KV_HEADS * KEYS * DIM, 2);
    void *v_data = filled(KV_HEADS * KEYS * DIM, 3);
    void *out_data = device_memory(out_bytes);
    void *lse_data = device_memory(lse_bytes);
    /* Poison: a call that does nothing prints what no attention gives. */
    CHECK(aclrtMemset(out_data, out_bytes, 0x5A, out_bytes));
    CHECK(aclrtMemset(lse_data, lse_bytes, 0x5A, lse_bytes));

    aclTensor *query = describe(q_shape, ACL_FLOAT16, q_data);
    const aclTensor *keys[1];
    const aclTensor *values[1];
    keys[0] = describe(kv_shape, ACL_FLOAT16, k_data);
    values[0] = describe(kv_shape, ACL_FLOAT16, v_data);
    aclTensorList *key = aclCreateTensorList(keys, 1);
    aclTensorList *value = aclCreateTensorList(values, 1);
    aclTensor *out = describe(q_shape, ACL_FLOAT16, out_data);
    aclTensor *lse = describe(lse_shape, ACL_FLOAT, lse_data);

    /* A null query is refused by name; what the message says is the library's. */
    int refused = (int)aclnnFusedInferAttentionScoreGetWorkspaceSize(
        NULL, key, value, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, HEADS,
        0.25, PRE_TOKENS, 2147483647, layout, KV_HEADS, 0, 0, 0, 0, true, out, lse, &workspace_size, &executor);
    printf("refused %d %s\n", refused, aclGetRecentErrMsg() != NULL ? "with a message" : "without a message");

    CHECK(aclnnFusedInferAttentionScoreGetWorkspaceSize(
        query, key, value, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, HEADS,
        0.25, PRE_TOKENS, 2147483647, layout, KV_HEADS, 0, 0, 0, 0, true, out, lse, &workspace_size, &executor));
    if (workspace_size > 0) {
        workspace = device_memory((size_t)workspace_size);
    }
    CHECK(aclnnFusedInferAttentionScore(workspace, workspace_size, executor, stream));
    CHECK(aclrtSynchronizeStream(stream));

    aclFloat16 host_out[HEADS * QUERIES * DIM];
    float host_lse[HEADS * QUERIES];
    CHECK(aclrtMemcpy(host_out, sizeof(host_out), out_data, out_bytes, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(aclrtMemcpy(host_lse, sizeof(host_lse), lse_data, lse_bytes, ACL_MEMCPY_DEVICE_TO_HOST));
    for (int i = 0; i < HEADS * QUERIES * DIM; ++i) {
        printf("out %d %.9g\n", i, (double)aclFloat16ToFloat(host_out[i]));
    }
    for (int i = 0; i < HEADS * QUERIES; ++i) {
        printf("lse %d %.9g\n", i, (double)host_lse[i]);
    }

    CHECK(aclDestroyTensor(query));
    CHECK(aclDestroyTensorList(key));
    CHECK(aclDestroyTensorList(value));
    CHECK(aclDestroyTensor(out));
    CHECK(aclDestroyTensor(lse));
    CHECK(aclrtFree(q_data));
    CHECK(aclrtFree(k_data));
    CHECK(aclrtFree(v_data));
    CHECK(aclrtFree(out_data));
    CHECK(aclrtFree(lse_data));
    if (workspace != NULL) {
        CHECK(aclrtFree(workspace));
    }
    CHECK(aclrtDestroyStream(stream));
    CHECK(aclrtResetDevice(0));
    CHECK(aclFinalize());
    printf("done\n");
    return 0;
}
