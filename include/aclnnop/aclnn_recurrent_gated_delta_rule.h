/*
 * aclnnRecurrentGatedDeltaRule (libopapi): linear attention of few tokens over a pool of states. CANN 8.1 does not
 * have it.
 * Written for this project from the documented ABI; no vendor text.
 *
 * g, gk and numAcceptedTokens may be null.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_RECURRENT_GATED_DELTA_RULE_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_RECURRENT_GATED_DELTA_RULE_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor.
 * Since a release after 8.1.
 *
 * Lengths, slots and accepted counts are tensors on the device, which the host does not see. stateRef is read and
 * written. scaleValue is a float, not a double.
 */
aclnnStatus aclnnRecurrentGatedDeltaRuleGetWorkspaceSize(
    const aclTensor *query,
    const aclTensor *key,
    const aclTensor *value,
    const aclTensor *beta,
    aclTensor *stateRef,
    const aclTensor *actualSeqLengths,
    const aclTensor *ssmStateIndices,
    const aclTensor *g,
    const aclTensor *gk,
    const aclTensor *numAcceptedTokens,
    float scaleValue,
    const aclTensor *out,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. Since a release after 8.1. */
aclnnStatus aclnnRecurrentGatedDeltaRule(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
