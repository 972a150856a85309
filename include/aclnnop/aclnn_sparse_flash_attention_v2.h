/*
 * aclnnSparseFlashAttentionV2 (libopapi): latent attention to chosen keys, with sinks. CANN 8.1 does not have it.
 * Written for this project from the documented ABI; no vendor text.
 *
 * Everything named ...Optional may be null.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_SPARSE_FLASH_ATTENTION_V2_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_SPARSE_FLASH_ATTENTION_V2_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor.
 * Since a release after 8.1.
 *
 * Lengths are tensors on the device: running sums for TND, lengths for BSND and PA_BSND. sinksOptional, one more
 * logit for each head, is for Ascend 950 alone, and not for PA_BSND. queryRope and keyRope must not be null. softmaxMax
 * and softmaxSum must not be null either; without returnSoftmaxLse they may be empty.
 */
aclnnStatus aclnnSparseFlashAttentionV2GetWorkspaceSize(
    const aclTensor *query,
    const aclTensor *key,
    const aclTensor *valueOptional,
    const aclTensor *sparseIndices,
    const aclTensor *blockTableOptional,
    const aclTensor *actualSeqLengthsQueryOptional,
    const aclTensor *actualSeqLengthsKvOptional,
    const aclTensor *queryRope,
    const aclTensor *keyRope,
    const aclTensor *sinksOptional,
    double scaleValue,
    int64_t sparseBlockSize,
    char *layoutQuery,
    char *layoutKv,
    int64_t sparseMode,
    int64_t preTokens,
    int64_t nextTokens,
    int64_t attentionMode,
    bool returnSoftmaxLse,
    const aclTensor *attentionOut,
    const aclTensor *softmaxMax,
    const aclTensor *softmaxSum,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. Since a release after 8.1. */
aclnnStatus aclnnSparseFlashAttentionV2(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
