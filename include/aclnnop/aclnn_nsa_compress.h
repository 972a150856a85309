/*
 * aclnnNsaCompress (libopapi): compresses blocks of tokens into one token each. CANN 8.1 does not have it.
 * Written for this project from the documented ABI; no vendor text.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_NSA_COMPRESS_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_NSA_COMPRESS_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor.
 * Since a release after 8.1.
 *
 * input is [T, N, D] and weight [compressBlockSize, N]; actSeqLen has the end of each sequence, a running sum.
 */
aclnnStatus aclnnNsaCompressGetWorkspaceSize(
    const aclTensor *input,
    const aclTensor *weight,
    const aclIntArray *actSeqLen,
    char *layout,
    int64_t compressBlockSize,
    int64_t compressStride,
    int64_t actSeqLenType,
    const aclTensor *output,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. Since a release after 8.1. */
aclnnStatus aclnnNsaCompress(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
