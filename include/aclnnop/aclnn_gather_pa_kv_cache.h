/*
 * aclnnGatherPaKvCache (libopapi): copies keys and values of sequences out of a paged cache. CANN 8.1 does not have it.
 * Written for this project from the documented ABI; no vendor text.
 *
 * Everything named ...Optional may be null.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_GATHER_PA_KV_CACHE_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_GATHER_PA_KV_CACHE_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor.
 * Since a release after 8.1.
 */
aclnnStatus aclnnGatherPaKvCacheGetWorkspaceSize(
    const aclTensor *keyCache,
    const aclTensor *valueCache,
    const aclTensor *blockTables,
    const aclTensor *seqLens,
    aclTensor *keyRef,
    aclTensor *valueRef,
    const aclTensor *seqOffsetOptional,
    char *cacheModeOptional,
    bool isSeqLensCumsum,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. Since a release after 8.1. */
aclnnStatus aclnnGatherPaKvCache(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
