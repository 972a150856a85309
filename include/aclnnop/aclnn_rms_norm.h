/*
 * aclnnRmsNorm (libopapi): rows divided by their root mean square.
 * Written for this project from the documented ABI; no vendor text.
 */
#ifndef ASCEND_ATTENTION_ACLNNOP_ACLNN_RMS_NORM_H_
#define ASCEND_ATTENTION_ACLNNOP_ACLNN_RMS_NORM_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Phase one: checks the call, tells the bytes of device workspace it needs and prepares an executor.
 *
 * A row is the last axes of x, as many as gamma has. epsilon is added to the mean of its squares.
 */
aclnnStatus aclnnRmsNormGetWorkspaceSize(
    const aclTensor *x,
    const aclTensor *gamma,
    double epsilon,
    const aclTensor *yOut,
    const aclTensor *rstdOut,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);

/** Phase two: queues the prepared call on the stream. */
aclnnStatus aclnnRmsNorm(
    void *workspace,
    uint64_t workspaceSize,
    aclOpExecutor *executor,
    aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
