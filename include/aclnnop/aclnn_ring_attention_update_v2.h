/*
 * aclnnRingAttentionUpdateV2 (libopapi). V2 adds the order of packed softmax tensors. CANN 8.1 does not have it.
 * Written for this project from the documented ABI; no vendor text.
 *
 * Everything named ...Optional may be null.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_RING_ATTENTION_UPDATE_V2_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_RING_ATTENTION_UPDATE_V2_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor.
 * Since a release after 8.1.
 */
aclnnStatus aclnnRingAttentionUpdateV2GetWorkspaceSize(
    const aclTensor *prevAttnOut,
    const aclTensor *prevSoftmaxMax,
    const aclTensor *prevSoftmaxSum,
    const aclTensor *curAttnOut,
    const aclTensor *curSoftmaxMax,
    const aclTensor *curSoftmaxSum,
    const aclTensor *actualSeqQlenOptional,
    char *inputLayoutOptional,
    char *inputSoftmaxLayoutOptional,
    const aclTensor *attnOutOut,
    const aclTensor *softmaxMaxOut,
    const aclTensor *softmaxSumOut,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. Since a release after 8.1. */
aclnnStatus aclnnRingAttentionUpdateV2(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
