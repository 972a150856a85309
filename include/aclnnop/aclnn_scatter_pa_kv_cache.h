/*
 * aclnnScatterPaKvCache (libopapi): writes new keys and values into a paged cache. CANN 8.1 does not have it.
 * Written for this project from the documented ABI; no vendor text.
 *
 * Everything named ...Optional may be null. Without values, value and valueCacheRef are both null.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_SCATTER_PA_KV_CACHE_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_SCATTER_PA_KV_CACHE_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor.
 * Since a release after 8.1.
 */
aclnnStatus aclnnScatterPaKvCacheGetWorkspaceSize(
    const aclTensor *key,
    aclTensor *keyCacheRef,
    const aclTensor *slotMapping,
    const aclTensor *value,
    aclTensor *valueCacheRef,
    const aclTensor *compressLensOptional,
    const aclTensor *compressSeqOffsetOptional,
    const aclTensor *seqLensOptional,
    char *cacheModeOptional,
    char *scatterModeOptional,
    const aclIntArray *stridesOptional,
    const aclIntArray *offsetsOptional,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. Since a release after 8.1. */
aclnnStatus aclnnScatterPaKvCache(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
