/*
 * aclnnBatchMatMul (libopapi): products of matrices, one for each entry of the first axis.
 * Written for this project from the documented ABI; no vendor text.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_BATCH_MATMUL_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_BATCH_MATMUL_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor.
 *
 * cubeMathType 0 keeps FLOAT, 1 allows fewer digits, 2 multiplies FLOAT as FLOAT16, 3 as HFLOAT32.
 */
aclnnStatus aclnnBatchMatMulGetWorkspaceSize(
    const aclTensor *self,
    const aclTensor *mat2,
    aclTensor *out,
    int8_t cubeMathType,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. */
aclnnStatus aclnnBatchMatMul(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
