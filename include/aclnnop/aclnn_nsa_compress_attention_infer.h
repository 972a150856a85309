/*
 * aclnnNsaCompressAttentionInfer (libopapi): attends to compressed tokens, and chooses blocks by their weights. CANN
 * 8.1 does not have it.
 * Written for this project from the documented ABI; no vendor text.
 *
 * Everything named ...Optional may be null.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_NSA_COMPRESS_ATTENTION_INFER_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_NSA_COMPRESS_ATTENTION_INFER_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor.
 * Since a release after 8.1.
 *
 * Lengths are those of each sequence, no running sums. topKOutput has for each query row and key head the blocks of
 * selectBlockSize tokens that the row attends to next.
 */
aclnnStatus aclnnNsaCompressAttentionInferGetWorkspaceSize(
    const aclTensor *query,
    const aclTensor *key,
    const aclTensor *value,
    const aclTensor *attentionMaskOptional,
    const aclTensor *blockTable,
    const aclIntArray *actualQSeqLenOptional,
    const aclIntArray *actualCmpKvSeqLen,
    const aclIntArray *actualSelKvSeqLenOptional,
    const aclTensor *topKMaskOptional,
    int64_t numHeads,
    int64_t numKeyValueHeads,
    int64_t selectBlockSize,
    int64_t selectBlockCount,
    int64_t compressBlockSize,
    int64_t compressBlockStride,
    double scaleValue,
    char *layout,
    int64_t pageBlockSize,
    int64_t sparseMode,
    const aclTensor *output,
    const aclTensor *topKOutput,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. Since a release after 8.1. */
aclnnStatus aclnnNsaCompressAttentionInfer(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
