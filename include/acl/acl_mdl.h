/*
 * Graph capture and replay of the ACL C interface (libascendcl).
 * Written for this project from the documented ABI; no vendor text.
 */
#ifndef ASCEND_ATTENTION_ACL_ACL_MDL_H_
#define ASCEND_ATTENTION_ACL_ACL_MDL_H_

#include "acl/acl_base.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Which threads a capture forbids unsafe calls to. */
typedef enum aclmdlRICaptureMode {
    ACL_MODEL_RI_CAPTURE_MODE_GLOBAL = 0,
    ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL = 1,
    ACL_MODEL_RI_CAPTURE_MODE_RELAXED = 2
} aclmdlRICaptureMode;

/** Whether a stream is being captured. */
typedef enum aclmdlRICaptureStatus {
    ACL_MODEL_RI_CAPTURE_STATUS_NONE = 0,
    ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE = 1,
    ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED = 2
} aclmdlRICaptureStatus;

/** Begins to record the stream's work instead of running it. Not for the default stream. */
aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode);
/** Whether the stream is being captured, and into which graph. */
aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *modelRI);
/** Ends the capture and hands out the graph. */
aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *modelRI);
/** Exchanges the calling thread's capture mode: new one in, old one out. */
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode);
/** Queues a run of the graph. */
aclError aclmdlRIExecuteAsync(aclmdlRI modelRI, aclrtStream stream);
/** Runs the graph and waits for at most `timeout` milliseconds (-1: for ever). Since a release after 8.1. */
aclError aclmdlRIExecute(aclmdlRI modelRI, int32_t timeout);
/** Destroys a graph. */
aclError aclmdlRIDestroy(aclmdlRI modelRI);
/** Prints a graph. */
aclError aclmdlRIDebugPrint(aclmdlRI modelRI);
/** Begins a group of tasks that can be updated later. */
aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream);
/** Ends the group and hands it out. */
aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp *handle);
/** Begins to give a group new parameters, on a stream that is not captured. */
aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle);
/** Ends the update. */
aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif
