/*
 * aclnnIncreFlashAttentionV3 (libopapi). V3 adds quantised keys and values, paged caches and the precision, and uses the
 * position bias.
 * Written for this project from the documented ABI; no vendor text.
 *
 * Everything named ...Optional may be null.
 * actualSeqLengths are the lengths of keys and values.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_INCRE_FLASH_ATTENTION_V3_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_INCRE_FLASH_ATTENTION_V3_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor. */
aclnnStatus aclnnIncreFlashAttentionV3GetWorkspaceSize(
    const aclTensor *query,
    const aclTensorList *key,
    const aclTensorList *value,
    const aclTensor *pseShiftOptional,
    const aclTensor *attenMaskOptional,
    const aclIntArray *actualSeqLengthsOptional,
    const aclTensor *dequantScale1Optional,
    const aclTensor *quantScale1Optional,
    const aclTensor *dequantScale2Optional,
    const aclTensor *quantScale2Optional,
    const aclTensor *quantOffset2Optional,
    const aclTensor *antiquantScaleOptional,
    const aclTensor *antiquantOffsetOptional,
    const aclTensor *blocktableOptional,
    int64_t numHeads,
    double scaleValue,
    char *inputLayout,
    int64_t numKeyValueHeads,
    int64_t blockSize,
    int64_t innerPrecise,
    const aclTensor *attentionOut,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. */
aclnnStatus aclnnIncreFlashAttentionV3(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
