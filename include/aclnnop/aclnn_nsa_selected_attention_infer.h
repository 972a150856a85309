/*
 * aclnnNsaSelectedAttentionInfer (libopapi): attends to the tokens of chosen blocks. CANN 8.1 does not have it.
 * Written for this project from the documented ABI; no vendor text.
 *
 * Everything named ...Optional may be null.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_NSA_SELECTED_ATTENTION_INFER_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_NSA_SELECTED_ATTENTION_INFER_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor.
 * Since a release after 8.1.
 *
 * Lengths are those of each sequence, no running sums. topkIndices has for each query row and key head the blocks of
 * selectBlockSize tokens that the row attends to; entries below 0 are passed over.
 */
aclnnStatus aclnnNsaSelectedAttentionInferGetWorkspaceSize(
    const aclTensor *query,
    const aclTensor *key,
    const aclTensor *value,
    const aclTensor *topkIndices,
    const aclTensor *attenMaskOptional,
    const aclTensor *blockTable,
    const aclIntArray *actualQSeqLen,
    const aclIntArray *actualKvSeqLen,
    char *layout,
    int64_t numHeads,
    int64_t numKeyValueHeads,
    int64_t selectBlockSize,
    int64_t selectBlockCount,
    int64_t pageBlockSize,
    double scaleValue,
    int64_t sparseMode,
    const aclTensor *output,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. Since a release after 8.1. */
aclnnStatus aclnnNsaSelectedAttentionInfer(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
