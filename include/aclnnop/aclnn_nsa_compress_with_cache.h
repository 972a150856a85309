/*
 * aclnnNsaCompressWithCache (libopapi): compresses the newest block of a sequence into a cache. CANN 8.1 does not
 * have it.
 * Written for this project from the documented ABI; no vendor text.
 *
 * Everything named ...Optional may be null.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_NSA_COMPRESS_WITH_CACHE_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_NSA_COMPRESS_WITH_CACHE_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor.
 * Since a release after 8.1.
 *
 * A sequence whose newest token completes a block writes the row of outputCache that slotMapping names; other rows stay
 * as they are. actSeqLen has the length of each sequence.
 */
aclnnStatus aclnnNsaCompressWithCacheGetWorkspaceSize(
    const aclTensor *input,
    const aclTensor *weight,
    const aclTensor *slotMapping,
    const aclIntArray *actSeqLenOptional,
    const aclTensor *blockTableOptional,
    char *layoutOptional,
    int64_t compressBlockSize,
    int64_t compressStride,
    int64_t actSeqLenType,
    int64_t pageBlockSize,
    aclTensor *outputCache,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. Since a release after 8.1. */
aclnnStatus aclnnNsaCompressWithCache(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
