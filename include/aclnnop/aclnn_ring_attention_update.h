/*
 * aclnnRingAttentionUpdate (libopapi): merges the outputs of aclnnFlashAttentionScore over two parts of the keys.
 * Written for this project from the documented ABI; no vendor text.
 *
 * Everything named ...Optional may be null.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_RING_ATTENTION_UPDATE_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_RING_ATTENTION_UPDATE_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor. */
aclnnStatus aclnnRingAttentionUpdateGetWorkspaceSize(
    const aclTensor *prevAttnOut,
    const aclTensor *prevSoftmaxMax,
    const aclTensor *prevSoftmaxSum,
    const aclTensor *curAttnOut,
    const aclTensor *curSoftmaxMax,
    const aclTensor *curSoftmaxSum,
    const aclTensor *actualSeqQlenOptional,
    char *inputLayoutOptional,
    const aclTensor *attnOutOut,
    const aclTensor *softmaxMaxOut,
    const aclTensor *softmaxSumOut,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. */
aclnnStatus aclnnRingAttentionUpdate(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
