/*
 * aclnnPromptFlashAttentionV3 (libopapi). V3 adds the precision, and uses the position bias.
 * Written for this project from the documented ABI; no vendor text.
 *
 * Everything named ...Optional may be null.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_PROMPT_FLASH_ATTENTION_V3_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_PROMPT_FLASH_ATTENTION_V3_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor. */
aclnnStatus aclnnPromptFlashAttentionV3GetWorkspaceSize(
    const aclTensor *query,
    const aclTensor *key,
    const aclTensor *value,
    const aclTensor *pseShiftOptional,
    const aclTensor *attenMaskOptional,
    const aclIntArray *actualSeqLengthsOptional,
    const aclIntArray *actualSeqLengthsKvOptional,
    const aclTensor *deqScale1Optional,
    const aclTensor *quantScale1Optional,
    const aclTensor *deqScale2Optional,
    const aclTensor *quantScale2Optional,
    const aclTensor *quantOffset2Optional,
    int64_t numHeads,
    double scaleValue,
    int64_t preTokens,
    int64_t nextTokens,
    char *inputLayout,
    int64_t numKeyValueHeads,
    int64_t sparseMode,
    int64_t innerPrecise,
    const aclTensor *attentionOut,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. */
aclnnStatus aclnnPromptFlashAttentionV3(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
