/*
 * aclnnAttentionUpdate (libopapi): merges attention over parts of the keys by their log-sum-exps. CANN 8.1 does not
 * have it.
 * Written for this project from the documented ABI; no vendor text.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_ATTENTION_UPDATE_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_ATTENTION_UPDATE_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor.
 *
 * updateType 0: lseOut is null. updateType 1: lseOut takes the merged log-sum-exps.
 * Since a release after 8.1.
 */
aclnnStatus aclnnAttentionUpdateGetWorkspaceSize(
    const aclTensorList *lse,
    const aclTensorList *localOut,
    int64_t updateType,
    aclTensor *out,
    aclTensor *lseOut,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. Since a release after 8.1. */
aclnnStatus aclnnAttentionUpdate(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
