/*
 * Attention of training in C: FlashAttentionScore over two parts of the keys, merged by RingAttentionUpdate, and
 * FlashAttentionVarLenScore in sparse mode 7. Prints the outputs, and of the merged rows the log-sum-exp.
 *
 * FLOAT, 2 heads of 16. The parts: SBH, 3 rows, 5 keys each. The packed rows: sequences of 2 and 3 rows over 2 and 5 keys.
 * Element i of the tensor with seed s is ((37 i + 101 s) mod 65) / 32 - 1.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "acl/acl.h"
#include "aclnn/acl_meta.h"
#include "aclnnop/aclnn_flash_attention_score.h"
#include "aclnnop/aclnn_ring_attention_update.h"

enum { HEADS = 2, DIM = 16, ROWS = 3, KEYS = 5, PACKED_ROWS = 5, PACKED_KEYS = 7, COPIES = 8, SIDE = 2048 };

static const int64_t ALL_TOKENS = 2147483647;

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        int status_ = (int)(call);                                                                                     \
        if (status_ != 0) {                                                                                            \
            const char *text_ = aclGetRecentErrMsg();                                                                  \
            fprintf(stderr, "%s: %d: %s\n", #call, status_, text_ == NULL ? "no message" : text_);                     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* A tensor and its device memory. */
struct tensor {
    aclTensor *handle;
    void *data;
    size_t bytes;
};

static struct tensor tensor(const int64_t *shape, uint64_t rank, aclDataType type, size_t size)
{
    struct tensor made = {NULL, NULL, size};
    int64_t strides[4] = {1, 1, 1, 1};
    for (uint64_t axis = rank; axis-- > 0;) {
        if (axis + 1 < rank) {
            strides[axis] = strides[axis + 1] * shape[axis + 1];
        }
        made.bytes *= (size_t)shape[axis];
    }
    if (made.bytes > 0) {
        CHECK(aclrtMalloc(&made.data, made.bytes, ACL_MEM_MALLOC_HUGE_FIRST));
        /* Poison: a call that does nothing prints what no attention gives. */
        CHECK(aclrtMemset(made.data, made.bytes, 0x5A, made.bytes));
    }
    made.handle = aclCreateTensor(shape, rank, type, strides, 0, ACL_FORMAT_ND, shape, rank, made.data);
    if (made.handle == NULL) {
        fprintf(stderr, "aclCreateTensor: %s\n", aclGetRecentErrMsg());
        exit(1);
    }
    return made;
}

static void upload(const struct tensor *to, const void *host)
{
    CHECK(aclrtMemcpy(to->data, to->bytes, host, to->bytes, ACL_MEMCPY_HOST_TO_DEVICE));
}

/* A tensor whose elements follow from a seed. */
static struct tensor filled(const int64_t *shape, uint64_t rank, int seed)
{
    struct tensor made = tensor(shape, rank, ACL_FLOAT, sizeof(float));
    float *host = malloc(made.bytes);
    if (host == NULL) {
        exit(1);
    }
    for (size_t i = 0; i < made.bytes / sizeof(float); ++i) {
        host[i] = (float)((i * 37 + (size_t)seed * 101) % 65) / 32.0F - 1.0F;
    }
    upload(&made, host);
    free(host);
    return made;
}

static void release(struct tensor *of)
{
    CHECK(aclDestroyTensor(of->handle));
    if (of->data != NULL) {
        CHECK(aclrtFree(of->data));
    }
}

/* Attention with the maxima and sums of its rows. */
struct part {
    struct tensor out, max, sum;
};

static struct part part(void)
{
    int64_t out[3] = {ROWS, 1, HEADS * DIM};
    int64_t softmax[4] = {1, HEADS, ROWS, COPIES};
    struct part made;
    made.out = tensor(out, 3, ACL_FLOAT, sizeof(float));
    made.max = tensor(softmax, 4, ACL_FLOAT, sizeof(float));
    made.sum = tensor(softmax, 4, ACL_FLOAT, sizeof(float));
    return made;
}

static void release_part(struct part *of)
{
    release(&of->out);
    release(&of->max);
    release(&of->sum);
}

typedef aclnnStatus (*phase_two)(void *, uint64_t, aclOpExecutor *, aclrtStream);

static void launch(phase_two two, uint64_t bytes, aclOpExecutor *executor, aclrtStream stream)
{
    void *workspace = NULL;
    if (bytes > 0) {
        CHECK(aclrtMalloc(&workspace, (size_t)bytes, ACL_MEM_MALLOC_HUGE_FIRST));
    }
    CHECK(two(workspace, bytes, executor, stream));
    CHECK(aclrtSynchronizeStream(stream));
    if (workspace != NULL) {
        CHECK(aclrtFree(workspace));
    }
}

static void print_out(const struct tensor *out, int first)
{
    float host[PACKED_ROWS * HEADS * DIM];
    CHECK(aclrtMemcpy(host, sizeof(host), out->data, out->bytes, ACL_MEMCPY_DEVICE_TO_HOST));
    for (int i = 0; i < (int)(out->bytes / sizeof(float)); ++i) {
        printf("out %d %.9g\n", first + i, (double)host[i]);
    }
}

static void attend(const struct tensor *query, int seed, struct part *to, struct tensor *none, aclrtStream stream)
{
    int64_t shape[3] = {KEYS, 1, HEADS * DIM};
    char layout[] = "SBH";
    struct tensor key = filled(shape, 3, seed);
    struct tensor value = filled(shape, 3, seed + 1);
    uint64_t bytes = 0;
    aclOpExecutor *executor = NULL;
    CHECK(aclnnFlashAttentionScoreGetWorkspaceSize(
        query->handle, key.handle, value.handle, NULL, NULL, NULL, NULL, NULL, 0.25, 1.0, ALL_TOKENS, ALL_TOKENS, HEADS,
        layout, 0, 0, to->max.handle, to->sum.handle, none->handle, to->out.handle, &bytes, &executor));
    launch(aclnnFlashAttentionScore, bytes, executor, stream);
    release(&key);
    release(&value);
}

static void parts_and_merge(struct tensor *none, aclrtStream stream)
{
    int64_t shape[3] = {ROWS, 1, HEADS * DIM};
    char layout[] = "SBH";
    uint64_t bytes = 0;
    aclOpExecutor *executor = NULL;
    float max[HEADS * ROWS * COPIES];
    float sum[HEADS * ROWS * COPIES];
    struct tensor query = filled(shape, 3, 1);
    struct part first = part();
    struct part second = part();
    struct part merged = part();

    attend(&query, 2, &first, none, stream);
    attend(&query, 4, &second, none, stream);
    CHECK(aclnnRingAttentionUpdateGetWorkspaceSize(
        first.out.handle, first.max.handle, first.sum.handle, second.out.handle, second.max.handle, second.sum.handle,
        NULL, layout, merged.out.handle, merged.max.handle, merged.sum.handle, &bytes, &executor));
    launch(aclnnRingAttentionUpdate, bytes, executor, stream);

    print_out(&merged.out, 0);
    CHECK(aclrtMemcpy(max, sizeof(max), merged.max.data, merged.max.bytes, ACL_MEMCPY_DEVICE_TO_HOST));
    CHECK(aclrtMemcpy(sum, sizeof(sum), merged.sum.data, merged.sum.bytes, ACL_MEMCPY_DEVICE_TO_HOST));
    for (int i = 0; i < HEADS * ROWS * COPIES; ++i) {
        printf("lse %d %.9g\n", i, (double)max[i] + log((double)sum[i]));
    }
    release(&query);
    release_part(&first);
    release_part(&second);
    release_part(&merged);
}

static void packed(struct tensor *none, aclrtStream stream)
{
    int64_t rows[3] = {PACKED_ROWS, HEADS, DIM};
    int64_t keys[3] = {PACKED_KEYS, HEADS, DIM};
    int64_t softmax[3] = {PACKED_ROWS, HEADS, COPIES};
    int64_t square[2] = {SIDE, SIDE};
    int64_t q_ends[2] = {2, 5};
    int64_t kv_ends[2] = {2, 7};
    char layout[] = "TND";
    uint64_t bytes = 0;
    aclOpExecutor *executor = NULL;
    struct tensor query = filled(rows, 3, 6);
    struct tensor key = filled(keys, 3, 7);
    struct tensor value = filled(keys, 3, 8);
    struct tensor out = tensor(rows, 3, ACL_FLOAT, sizeof(float));
    struct tensor max = tensor(softmax, 3, ACL_FLOAT, sizeof(float));
    struct tensor sum = tensor(softmax, 3, ACL_FLOAT, sizeof(float));
    struct tensor mask = tensor(square, 2, ACL_UINT8, 1);
    uint8_t *hidden = malloc((size_t)SIDE * SIDE);
    aclIntArray *of_rows = aclCreateIntArray(q_ends, 2);
    aclIntArray *of_keys = aclCreateIntArray(kv_ends, 2);
    if (hidden == NULL || of_rows == NULL || of_keys == NULL) {
        exit(1);
    }
    for (size_t i = 0; i < SIDE; ++i) {
        for (size_t j = 0; j < SIDE; ++j) {
            hidden[i * SIDE + j] = j > i;
        }
    }
    upload(&mask, hidden);
    free(hidden);

    /* The last sequence's band has to cover its keys. */
    int refused = (int)aclnnFlashAttentionVarLenScoreGetWorkspaceSize(
        query.handle, key.handle, value.handle, NULL, NULL, NULL, mask.handle, NULL, of_rows, of_keys, 0.25, 1.0, 4, -1,
        HEADS, layout, 0, 7, max.handle, sum.handle, none->handle, out.handle, &bytes, &executor);
    printf("refused %d %s\n", refused, aclGetRecentErrMsg() != NULL ? "with a message" : "without a message");
    CHECK(aclnnFlashAttentionVarLenScoreGetWorkspaceSize(
        query.handle, key.handle, value.handle, NULL, NULL, NULL, mask.handle, NULL, of_rows, of_keys, 0.25, 1.0,
        PACKED_KEYS, -1, HEADS, layout, 0, 7, max.handle, sum.handle, none->handle, out.handle, &bytes, &executor));
    launch(aclnnFlashAttentionVarLenScore, bytes, executor, stream);

    print_out(&out, ROWS * HEADS * DIM);
    CHECK(aclDestroyIntArray(of_rows));
    CHECK(aclDestroyIntArray(of_keys));
    release(&query);
    release(&key);
    release(&value);
    release(&out);
    release(&max);
    release(&sum);
    release(&mask);
}

int main(void)
{
    aclrtStream stream = NULL;
    int64_t nothing[1] = {0};

    CHECK(aclInit(NULL));
    CHECK(aclrtSetDevice(0));
    CHECK(aclrtCreateStream(&stream));
    struct tensor none = tensor(nothing, 1, ACL_FLOAT, sizeof(float));
    parts_and_merge(&none, stream);
    packed(&none, stream);
    release(&none);
    CHECK(aclrtDestroyStream(stream));
    CHECK(aclrtResetDevice(0));
    CHECK(aclFinalize());
    printf("done\n");
    return 0;
}
