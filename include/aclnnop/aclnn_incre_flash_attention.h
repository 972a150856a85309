/*
 * aclnnIncreFlashAttention (libopapi): attention of one query row a sequence. It takes a position bias and
 * computes without it.
 * Written for this project from the documented ABI; no vendor text.
 *
 * Everything named ...Optional may be null.
 * actualSeqLengths are the lengths of keys and values.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_INCRE_FLASH_ATTENTION_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_INCRE_FLASH_ATTENTION_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor. */
aclnnStatus aclnnIncreFlashAttentionGetWorkspaceSize(
    const aclTensor *query,
    const aclTensorList *key,
    const aclTensorList *value,
    const aclTensor *pseShiftOptional,
    const aclTensor *attenMaskOptional,
    const aclIntArray *actualSeqLengthsOptional,
    int64_t numHeads,
    double scaleValue,
    char *inputLayout,
    int64_t numKeyValueHeads,
    const aclTensor *attentionOut,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. */
aclnnStatus aclnnIncreFlashAttention(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
