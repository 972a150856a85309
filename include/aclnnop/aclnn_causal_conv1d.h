/*
 * aclnnCausalConv1d (libcust_opapi of vLLM-Ascend's operator package): the causal convolution in front of linear
 * attention. No release of CANN has it.
 * Written for this project from the documented ABI; no vendor text.
 *
 * bias, queryStartLoc, cacheIndices, initialStateMode and numAcceptedTokens may be null.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_CAUSAL_CONV1D_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_CAUSAL_CONV1D_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor.
 * Since a release after 8.1.
 *
 * Starts, lines and accepted counts are tensors on the device. convStates is read and written.
 */
aclnnStatus aclnnCausalConv1dGetWorkspaceSize(
    const aclTensor *x,
    const aclTensor *weight,
    const aclTensor *bias,
    aclTensor *convStates,
    const aclTensor *queryStartLoc,
    const aclTensor *cacheIndices,
    const aclTensor *initialStateMode,
    const aclTensor *numAcceptedTokens,
    int64_t activationMode,
    int64_t padSlotId,
    int64_t runMode,
    const aclTensor *y,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. Since a release after 8.1. */
aclnnStatus aclnnCausalConv1d(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
