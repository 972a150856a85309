/*
 * Devices, contexts, streams, events and memory of the ACL C interface (libascendcl).
 * Written for this project from the documented ABI; no vendor text.
 *
 * Device, context and default stream are per thread: each thread calls aclrtSetDevice or
 * aclrtSetCurrentContext before anything else here.
 */
#ifndef ASCEND_ATTENTION_ACL_ACL_RT_H_
#define ASCEND_ATTENTION_ACL_ACL_RT_H_

#include "acl/acl_base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Flags of aclrtCreateEventWithFlag and aclrtCreateEventExWithFlag. */
#define ACL_EVENT_SYNC 0x00000001U
#define ACL_EVENT_CAPTURE_STREAM_PROGRESS 0x00000002U
#define ACL_EVENT_TIME_LINE 0x00000008U
#define ACL_EVENT_DEVICE_USE_ONLY 0x00000010U /* since a release after 8.1 */
#define ACL_EVENT_EXTERNAL 0x00000020U
#define ACL_EVENT_IPC 0x00000040U /* since a release after 8.1 */

/* Flags of aclrtCreateStreamWithConfig. */
#define ACL_STREAM_FAST_LAUNCH 0x00000001U
#define ACL_STREAM_FAST_SYNC 0x00000002U
#define ACL_STREAM_PERSISTENT 0x00000004U      /* since a release after 8.1 */
#define ACL_STREAM_HUGE 0x00000008U            /* since a release after 8.1 */
#define ACL_STREAM_CPU_SCHEDULE 0x00000010U    /* since a release after 8.1 */
#define ACL_STREAM_DEVICE_USE_ONLY 0x00000020U /* since a release after 8.1 */

/** Direction of a copy. */
typedef enum aclrtMemcpyKind {
    ACL_MEMCPY_HOST_TO_HOST = 0,
    ACL_MEMCPY_HOST_TO_DEVICE = 1,
    ACL_MEMCPY_DEVICE_TO_HOST = 2,
    ACL_MEMCPY_DEVICE_TO_DEVICE = 3,
    ACL_MEMCPY_DEFAULT = 4,
    ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE = 5,
    ACL_MEMCPY_INNER_DEVICE_TO_DEVICE = 6,
    ACL_MEMCPY_INTER_DEVICE_TO_DEVICE = 7
} aclrtMemcpyKind;

/** Page size and place of an allocation. The values from 0x100 on are bit flags. */
typedef enum aclrtMemMallocPolicy {
    ACL_MEM_MALLOC_HUGE_FIRST = 0,
    ACL_MEM_MALLOC_HUGE_ONLY = 1,
    ACL_MEM_MALLOC_NORMAL_ONLY = 2,
    ACL_MEM_MALLOC_HUGE_FIRST_P2P = 3,
    ACL_MEM_MALLOC_HUGE_ONLY_P2P = 4,
    ACL_MEM_MALLOC_NORMAL_ONLY_P2P = 5,
    ACL_MEM_MALLOC_HUGE1G_ONLY = 6,
    ACL_MEM_MALLOC_HUGE1G_ONLY_P2P = 7,
    ACL_MEM_TYPE_LOW_BAND_WIDTH = 0x0100,
    ACL_MEM_TYPE_HIGH_BAND_WIDTH = 0x1000,
    ACL_MEM_ACCESS_USER_SPACE_READONLY = 0x100000
} aclrtMemMallocPolicy;

/** Memory that aclrtGetMemInfo measures. */
typedef enum aclrtMemAttr {
    ACL_DDR_MEM = 0,
    ACL_HBM_MEM = 1,
    ACL_DDR_MEM_HUGE = 2,
    ACL_DDR_MEM_NORMAL = 3,
    ACL_HBM_MEM_HUGE = 4,
    ACL_HBM_MEM_NORMAL = 5,
    ACL_DDR_MEM_P2P_HUGE = 6,
    ACL_DDR_MEM_P2P_NORMAL = 7,
    ACL_HBM_MEM_P2P_HUGE = 8,
    ACL_HBM_MEM_P2P_NORMAL = 9,
    ACL_HBM_MEM_HUGE1G = 10,
    ACL_HBM_MEM_P2P_HUGE1G = 11,
    /* Since a release of 2026, as are all the following: DDR or HBM, whichever the device has. */
    ACL_MEM_NORMAL = 12,
    ACL_MEM_HUGE = 13,
    ACL_MEM_HUGE1G = 14,
    ACL_MEM_P2P_NORMAL = 15,
    ACL_MEM_P2P_HUGE = 16,
    ACL_MEM_P2P_HUGE1G = 17
} aclrtMemAttr;

/** What aclrtStreamQuery found. */
typedef enum aclrtStreamStatus {
    ACL_STREAM_STATUS_COMPLETE = 0,
    ACL_STREAM_STATUS_NOT_READY = 1,
    ACL_STREAM_STATUS_RESERVED = 0xFFFF
} aclrtStreamStatus;

/** Event status of the old query. */
typedef enum aclrtEventStatus {
    ACL_EVENT_STATUS_COMPLETE = 0,
    ACL_EVENT_STATUS_NOT_READY = 1,
    ACL_EVENT_STATUS_RESERVED = 2
} aclrtEventStatus;

/** Whether an event's record was reached. Numbered opposite to aclrtEventWaitStatus. */
typedef enum aclrtEventRecordedStatus {
    ACL_EVENT_RECORDED_STATUS_NOT_READY = 0,
    ACL_EVENT_RECORDED_STATUS_COMPLETE = 1
} aclrtEventRecordedStatus;

/** Whether all waits for an event are over. Numbered opposite to aclrtEventRecordedStatus. */
typedef enum aclrtEventWaitStatus {
    ACL_EVENT_WAIT_STATUS_COMPLETE = 0,
    ACL_EVENT_WAIT_STATUS_NOT_READY = 1,
    ACL_EVENT_WAIT_STATUS_RESERVED = 0xFFFF
} aclrtEventWaitStatus;

/** Where the program runs. */
typedef enum aclrtRunMode {
    ACL_DEVICE = 0,
    ACL_HOST = 1
} aclrtRunMode;

/** Options of a context or of the process. */
typedef enum aclSysParamOpt {
    ACL_OPT_DETERMINISTIC = 0,
    ACL_OPT_ENABLE_DEBUG_KERNEL = 1,
    /* Since a release after 8.1, as is the following. */
    ACL_OPT_STRONG_CONSISTENCY = 2,
    ACL_OPT_ENABLE_KERNEL_EARLY_START = 3
} aclSysParamOpt;

/** Whose last error is asked for. */
typedef enum aclrtLastErrLevel {
    ACL_RT_THREAD_LEVEL = 0
} aclrtLastErrLevel;

/* Devices. */

/** Makes a device the calling thread's current one and creates its default context. */
aclError aclrtSetDevice(int32_t deviceId);
/** Gives up one use of a device; the last one releases everything on it. */
aclError aclrtResetDevice(int32_t deviceId);
/** Releases everything on a device, however often it was set. */
aclError aclrtResetDeviceForce(int32_t deviceId);
/** The calling thread's current device. */
aclError aclrtGetDevice(int32_t *deviceId);
/** How many devices there are. */
aclError aclrtGetDeviceCount(uint32_t *count);
/** Whether the program runs on the host or on the device. */
aclError aclrtGetRunMode(aclrtRunMode *runMode);
/** Waits for all work of the current device. */
aclError aclrtSynchronizeDevice(void);
/** The same for at most `timeout` milliseconds; -1 waits for ever. */
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout);

/* Contexts. */

/** Creates a context and makes it the calling thread's current one. */
aclError aclrtCreateContext(aclrtContext *context, int32_t deviceId);
/** Destroys a context made by aclrtCreateContext. */
aclError aclrtDestroyContext(aclrtContext context);
/** Makes a context the calling thread's current one. */
aclError aclrtSetCurrentContext(aclrtContext context);
/** The calling thread's current context. */
aclError aclrtGetCurrentContext(aclrtContext *context);
/** Sets an option of the current context. */
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt opt, int64_t value);
/** Reads an option of the current context. */
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt opt, int64_t *value);
/** Sets an option of the process. */
aclError aclrtSetSysParamOpt(aclSysParamOpt opt, int64_t value);
/** Reads an option of the process. */
aclError aclrtGetSysParamOpt(aclSysParamOpt opt, int64_t *value);

/* Streams. */

/** Creates a stream in the current context. */
aclError aclrtCreateStream(aclrtStream *stream);
/** Creates a stream with a priority from 0 (highest) to 7 and ACL_STREAM_* flags. */
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag);
/** Waits for the stream's work, then destroys it. */
aclError aclrtDestroyStream(aclrtStream stream);
/** Destroys a stream without waiting for its work. */
aclError aclrtDestroyStreamForce(aclrtStream stream);
/** Waits for the stream's work; reports its device faults. */
aclError aclrtSynchronizeStream(aclrtStream stream);
/** The same for at most `timeout` milliseconds (-1: for ever), then ACL_ERROR_RT_STREAM_SYNC_TIMEOUT. */
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout);
/** Stops the stream's work and drops what is queued. */
aclError aclrtStreamAbort(aclrtStream stream);
/** Whether the stream's work is done. */
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status);
/** Lets later work of the stream wait for an event. */
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event);
/** A number naming the stream. */
aclError aclrtStreamGetId(aclrtStream stream, int32_t *streamId);

/* Events. */

/** Creates an event that can order and measure time. */
aclError aclrtCreateEvent(aclrtEvent *event);
/** Creates an event for the uses named by ACL_EVENT_* flags. */
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag);
/** Creates an event for the uses named by ACL_EVENT_* flags, without a limit on their number. */
aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag);
/** Destroys an event. */
aclError aclrtDestroyEvent(aclrtEvent event);
/** Waits for the event. */
aclError aclrtSynchronizeEvent(aclrtEvent event);
/** The same for at most `timeout` milliseconds (-1: for ever), then ACL_ERROR_RT_EVENT_SYNC_TIMEOUT. */
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout);
/** Marks the present end of the stream's work. */
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream);
/** Makes the event not recorded once the stream's work so far is done. */
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream);
/** Whether the event's record was reached. */
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status);
/** Whether all waits for the event are over. */
aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status);
/** Milliseconds between two recorded events; needs ACL_EVENT_TIME_LINE or aclrtCreateEvent. */
aclError aclrtEventElapsedTime(float *ms, aclrtEvent startEvent, aclrtEvent endEvent);

/* Memory. */

/** Allocates device memory; the size is padded by 32 bytes to a multiple of 32. Size 0 is an error. */
aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy policy);
/** Allocates device memory; the size is rounded to a multiple of 32 bytes. */
aclError aclrtMallocAlign32(void **devPtr, size_t size, aclrtMemMallocPolicy policy);
/** Frees device memory. */
aclError aclrtFree(void *devPtr);
/** Allocates pinned host memory. */
aclError aclrtMallocHost(void **hostPtr, size_t size);
/** Frees pinned host memory. */
aclError aclrtFreeHost(void *hostPtr);
/** Copies `count` bytes to a place that has `destMax`; returns when done. */
aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind);
/** Queues a copy; host memory has to be pinned and to stay until the stream is there. */
aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream);
/** Sets `count` bytes of device memory that has `maxCount`; returns when done. */
aclError aclrtMemset(void *devPtr, size_t maxCount, int32_t value, size_t count);
/** Queues a set of device memory. */
aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream);
/** Free and total bytes of a kind of memory. */
aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total);

/* Errors and limits. */

/** The latest error, which is then forgotten. */
aclError aclrtGetLastError(aclrtLastErrLevel level);
/** The latest error, which stays. */
aclError aclrtPeekAtLastError(aclrtLastErrLevel level);
/** Longest time an operator may run, in seconds. */
aclError aclrtSetOpExecuteTimeOut(uint32_t timeout);

#ifdef __cplusplus
}
#endif

#endif
