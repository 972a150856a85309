/*
 * aclnnFusedCausalConv1d (libopapi): the causal convolution of windows of 3 rows, from CANN 9.1 on.
 * Written for this project from the documented ABI; no vendor text.
 *
 * queryStartLoc (with x [B, L, dim]), cacheIndices, numAcceptedTokens, numComputedTokens and the tensors of blocks may
 * be null; initialStateMode, bias, activationMode and runMode are not read.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_FUSED_CAUSAL_CONV1D_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_FUSED_CAUSAL_CONV1D_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor.
 * Since a release after 8.1.
 *
 * Starts, lines, counts and blocks are tensors on the device. convStates is read and written.
 */
aclnnStatus aclnnFusedCausalConv1dGetWorkspaceSize(
    const aclTensor *x,
    const aclTensor *weight,
    aclTensor *convStates,
    const aclTensor *queryStartLoc,
    const aclTensor *cacheIndices,
    const aclTensor *initialStateMode,
    const aclTensor *bias,
    const aclTensor *numAcceptedTokens,
    const aclTensor *numComputedTokens,
    const aclTensor *blockIdxFirstScheduledToken,
    const aclTensor *blockIdxLastScheduledToken,
    const aclTensor *initialStateIdx,
    int64_t activationMode,
    int64_t padSlotId,
    int64_t runMode,
    int64_t maxQueryLen,
    int64_t residualConnection,
    int64_t blockSize,
    int64_t convMode,
    const aclTensor *y,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. Since a release after 8.1. */
aclnnStatus aclnnFusedCausalConv1d(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
