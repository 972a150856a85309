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

/* What a stream does after a task of it failed, for aclrtSetStreamFailureMode. */
#define ACL_CONTINUE_ON_FAILURE 0x00000000U
#define ACL_STOP_ON_FAILURE 0x00000001U

/* Flags of aclrtHostRegisterV2; since a release after 8.1. */
#define ACL_HOST_REG_MAPPED 0x2UL
#define ACL_HOST_REG_IOMEMORY 0x4UL
#define ACL_HOST_REG_READONLY 0x8UL
#define ACL_HOST_REG_PINNED 0x10000000UL

/* How aclrtValueWait compares the value at an address (left) with the one given; since a release after 8.1. */
#define ACL_STREAM_WAIT_VALUE_GEQ 0x00000000U /* their difference is not negative */
#define ACL_STREAM_WAIT_VALUE_EQ 0x00000001U
#define ACL_STREAM_WAIT_VALUE_AND 0x00000002U /* they have a bit in common */
#define ACL_STREAM_WAIT_VALUE_NOR 0x00000003U /* there is a bit that neither has */

/* Flags of aclrtCreateNotify; since a release after 8.1. */
#define ACL_NOTIFY_DEFAULT 0x00000000U
#define ACL_NOTIFY_DEVICE_USE_ONLY 0x00000001U

/** Physical memory. */
typedef void *aclrtDrvMemHandle;

/** A function that a stream calls on the host. */
typedef void (*aclrtCallback)(void *userData);
/** A function that a stream calls on the host. Since a release after 8.1. */
typedef void (*aclrtHostFunc)(void *args);

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

/** What becomes of numbers beyond the range of a floating-point type. */
typedef enum aclrtFloatOverflowMode {
    ACL_RT_OVERFLOW_MODE_SATURATION = 0,
    ACL_RT_OVERFLOW_MODE_INFNAN = 1,
    ACL_RT_OVERFLOW_MODE_UNDEF = 2
} aclrtFloatOverflowMode;

/** Cores of a device whose use can be limited. Since a release after 8.1. */
typedef enum aclrtDevResLimitType {
    ACL_RT_DEV_RES_CUBE_CORE = 0,
    ACL_RT_DEV_RES_VECTOR_CORE = 1
} aclrtDevResLimitType;

/** Attributes of a stream. Since a release after 8.1. */
typedef enum aclrtStreamAttr {
    ACL_STREAM_ATTR_FAILURE_MODE = 1,
    ACL_STREAM_ATTR_FLOAT_OVERFLOW_CHECK = 2,
    ACL_STREAM_ATTR_USER_CUSTOM_TAG = 3,
    ACL_STREAM_ATTR_CACHE_OP_INFO = 4,
    ACL_STREAM_ATTR_PRIORITY = 5
} aclrtStreamAttr;

/** The value of an attribute of a stream; 16 bytes. */
typedef union aclrtStreamAttrValue {
    uint64_t failureMode;
    uint32_t overflowSwitch;
    uint32_t userCustomTag;
    uint32_t cacheOpInfoSwitch;
    uint32_t streamPriority;
    uint32_t reserve[4];
} aclrtStreamAttrValue;

/** What aclrtGetDeviceInfo tells. Since a release after 8.1. */
typedef enum aclrtDevAttr {
    ACL_DEV_ATTR_AICPU_CORE_NUM = 1,
    ACL_DEV_ATTR_AICORE_CORE_NUM = 101,
    ACL_DEV_ATTR_CUBE_CORE_NUM = 102,
    ACL_DEV_ATTR_VECTOR_CORE_NUM = 201,
    ACL_DEV_ATTR_WARP_SIZE = 202,
    ACL_DEV_ATTR_MAX_THREAD_PER_VECTOR_CORE = 203,
    ACL_DEV_ATTR_UBUF_PER_VECTOR_CORE = 204,
    ACL_DEV_ATTR_MAX_GRID_DIM_X = 205,
    ACL_DEV_ATTR_MAX_GRID_DIM_Y = 206,
    ACL_DEV_ATTR_MAX_GRID_DIM_Z = 207,
    ACL_DEV_ATTR_MAX_BLOCK_PER_GRID = 208,
    ACL_DEV_ATTR_MAX_THREADS_PER_BLOCK = 209,
    ACL_DEV_ATTR_MAX_BLOCK_DIM_X = 210,
    ACL_DEV_ATTR_MAX_BLOCK_DIM_Y = 211,
    ACL_DEV_ATTR_MAX_BLOCK_DIM_Z = 212,
    ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE = 301,
    ACL_DEV_ATTR_L2_CACHE_SIZE = 302,
    ACL_DEV_ATTR_SMP_ID = 401,
    ACL_DEV_ATTR_PHY_CHIP_ID = 402,
    ACL_DEV_ATTR_SUPER_POD_DEVICE_ID = 403,
    ACL_DEV_ATTR_SUPER_POD_SERVER_ID = 404,
    ACL_DEV_ATTR_SUPER_POD_ID = 405,
    ACL_DEV_ATTR_CUST_OP_PRIVILEGE = 406,
    ACL_DEV_ATTR_MAINBOARD_ID = 407,
    ACL_DEV_ATTR_HD_CONNECT_TYPE = 408,
    ACL_DEV_ATTR_DEVICE_FORM_FACTOR = 409,
    ACL_DEV_ATTR_IS_VIRTUAL = 501,
    ACL_DEV_ATTR_NPU_ARCH = 601
} aclrtDevAttr;

/** The identity of a device. Since a release after 8.1. */
typedef struct aclrtUuid {
    char bytes[16];
} aclrtUuid;

/** How aclrtHostRegister registers host memory. */
typedef enum aclrtHostRegisterType {
    ACL_HOST_REGISTER_MAPPED = 0,
    /* Since a release after 8.1, as is the following. */
    ACL_HOST_REGISTER_IOMEMORY = 0x04,
    ACL_HOST_REGISTER_READONLY = 0x08
} aclrtHostRegisterType;

/** What an attribute of an allocation is about. */
typedef enum aclrtMallocAttrType {
    ACL_RT_MEM_ATTR_RSV = 0,
    ACL_RT_MEM_ATTR_MODULE_ID = 1,
    ACL_RT_MEM_ATTR_DEVICE_ID = 2,
    ACL_RT_MEM_ATTR_VA_FLAG = 3 /* since a release after 8.1 */
} aclrtMallocAttrType;

/** The value of an attribute of an allocation; 8 bytes. */
typedef union aclrtMallocAttrValue {
    uint16_t moduleId;
    uint32_t deviceId;
    uint32_t vaFlag; /* 1: the device reaches host memory under the host's address */
    uint8_t rsv[8];
} aclrtMallocAttrValue;

/** An attribute of an allocation. */
typedef struct aclrtMallocAttribute {
    aclrtMallocAttrType attr;
    aclrtMallocAttrValue value;
} aclrtMallocAttribute;

/** The attributes of an allocation. */
typedef struct aclrtMallocConfig {
    aclrtMallocAttribute *attrs;
    size_t numAttrs;
} aclrtMallocConfig;

/** Kind of memory at an address. */
typedef enum aclrtMemLocationType {
    ACL_MEM_LOCATION_TYPE_HOST = 0,
    ACL_MEM_LOCATION_TYPE_DEVICE = 1,
    /* Since a release after 8.1, as are all the following. */
    ACL_MEM_LOCATION_TYPE_UNREGISTERED = 2,
    ACL_MEM_LOCATION_TYPE_MANAGED = 3,
    ACL_MEM_LOCATION_TYPE_HOST_NUMA = 4
} aclrtMemLocationType;

/** Where memory is; `id` is the device's. */
typedef struct aclrtMemLocation {
    uint32_t id;
    aclrtMemLocationType type;
} aclrtMemLocation;

/** What aclrtPointerGetAttributes tells. */
typedef struct aclrtPtrAttributes {
    aclrtMemLocation location;
    uint32_t pageSize;
    uint32_t rsv[4];
} aclrtPtrAttributes;

/** How physical memory is to be shared. */
typedef enum aclrtMemHandleType {
    ACL_MEM_HANDLE_TYPE_NONE = 0,
    ACL_MEM_HANDLE_TYPE_POSIX = 2 /* since a release after 8.1 */
} aclrtMemHandleType;

/** How physical memory is allocated. */
typedef enum aclrtMemAllocationType {
    ACL_MEM_ALLOCATION_TYPE_PINNED = 0
} aclrtMemAllocationType;

/** What physical memory is asked for. */
typedef struct aclrtPhysicalMemProp {
    aclrtMemHandleType handleType;
    aclrtMemAllocationType allocationType;
    aclrtMemAttr memAttr;
    aclrtMemLocation location;
    uint64_t reserve;
} aclrtPhysicalMemProp;

/** Which unit of physical memory is asked for. */
typedef enum aclrtMemGranularityOptions {
    ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
    ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1,
    ACL_RT_MEM_ALLOC_GRANULARITY_UNDEF = 0xFFFF
} aclrtMemGranularityOptions;

/** Whether a stream waits for a callback. */
typedef enum aclrtCallbackBlockType {
    ACL_CALLBACK_NO_BLOCK = 0,
    ACL_CALLBACK_BLOCK = 1
} aclrtCallbackBlockType;

/** Both ends of the copies of a batch. Since a release after 8.1. */
typedef struct aclrtMemcpyBatchAttr {
    aclrtMemLocation dstLoc;
    aclrtMemLocation srcLoc;
    uint8_t rsv[16];
} aclrtMemcpyBatchAttr;

/** What aclrtCmoAsync does with the cache. */
typedef enum aclrtCmoType {
    ACL_RT_CMO_TYPE_PREFETCH = 0,
    ACL_RT_CMO_TYPE_WRITEBACK = 1,
    ACL_RT_CMO_TYPE_INVALID = 2,
    ACL_RT_CMO_TYPE_FLUSH = 3
} aclrtCmoType;

/** A range of memory with an error that cannot be corrected. */
typedef struct aclrtMemUceInfo {
    void *addr;
    size_t len;
    size_t reserved[14];
} aclrtMemUceInfo;

/** What is wrong with a device, in types that came with it. Since a release after 8.1. */
typedef enum aclrtErrorType {
    ACL_RT_NO_ERROR = 0,
    ACL_RT_ERROR_MEMORY = 1,
    ACL_RT_ERROR_L2 = 2,
    ACL_RT_ERROR_AICORE = 3,
    ACL_RT_ERROR_LINK = 4,
    ACL_RT_ERROR_L3_PORT = 5,
    ACL_RT_ERROR_OTHERS = 0xFFFF
} aclrtErrorType;

/** Who is to blame for a fault of a core. */
typedef enum aclrtAicoreErrorType {
    ACL_RT_AICORE_ERROR_UNKNOWN = 0,
    ACL_RT_AICORE_ERROR_SW = 1,
    ACL_RT_AICORE_ERROR_HW_LOCAL = 2
} aclrtAicoreErrorType;

/** Ranges of memory with errors. */
typedef struct aclrtMemUceInfoArray {
    size_t arraySize;
    aclrtMemUceInfo memUceInfoArray[20];
} aclrtMemUceInfoArray;

/** Details of what is wrong with a device. */
typedef union aclrtErrorInfoDetail {
    aclrtMemUceInfoArray uceInfo;
    aclrtAicoreErrorType aicoreErrType;
} aclrtErrorInfoDetail;

/** What is wrong with a device, and whether that may be repaired. */
typedef struct aclrtErrorInfo {
    uint8_t tryRepair;
    uint8_t hasDetail;
    uint8_t reserved[2];
    aclrtErrorType errorType;
    aclrtErrorInfoDetail detail;
} aclrtErrorInfo;

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

/** Whether work of a device may be aimed at what another device holds: 1 or 0. */
aclError aclrtDeviceCanAccessPeer(int32_t *canAccessPeer, int32_t deviceId, int32_t peerDeviceId);
/** Lets the current device reach another one's memory. `flags` is 0. */
aclError aclrtDeviceEnablePeerAccess(int32_t peerDeviceId, uint32_t flags);
/** Ends what aclrtDeviceEnablePeerAccess began. */
aclError aclrtDeviceDisablePeerAccess(int32_t peerDeviceId);
/** Whether a device may reach another one's memory: 1 or 0. Since a release after 8.1. */
aclError aclrtDevicePeerAccessStatus(int32_t deviceId, int32_t peerDeviceId, int32_t *status);
/** An attribute of a device. Since a release after 8.1. */
aclError aclrtGetDeviceInfo(uint32_t deviceId, aclrtDevAttr attr, int64_t *value);
/** The identity of a device. Since a release after 8.1. */
aclError aclrtDeviceGetUuid(int32_t deviceId, aclrtUuid *uuid);
/** The number of the device that a program calls `userDevid`. Since a release after 8.1. */
aclError aclrtGetLogicDevIdByUserDevId(const int32_t userDevid, int32_t *const logicDevId);
/** The number by which a program calls a device. Since a release after 8.1. */
aclError aclrtGetUserDevIdByLogicDevId(const int32_t logicDevId, int32_t *const userDevid);
/** This process's number as the host's kernel knows it. */
aclError aclrtDeviceGetBareTgid(int32_t *pid);
/** Sets what numbers out of range become, for streams made later. */
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode);
/** What numbers out of range become. */
aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode *mode);
/** How many cores this process uses of a device. Since a release after 8.1. */
aclError aclrtGetDeviceResLimit(int32_t deviceId, aclrtDevResLimitType type, uint32_t *value);
/** Limits the cores that this process uses of a device. Since a release after 8.1. */
aclError aclrtSetDeviceResLimit(int32_t deviceId, aclrtDevResLimitType type, uint32_t value);
/** Lifts the limits of aclrtSetDeviceResLimit. Since a release after 8.1. */
aclError aclrtResetDeviceResLimit(int32_t deviceId);
/** How many cores a stream uses. Since a release after 8.1. */
aclError aclrtGetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t *value);
/** Limits the cores that a stream uses, once a thread takes the limit over. Since a release after 8.1. */
aclError aclrtSetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t value);
/** Lifts the limits of aclrtSetStreamResLimit. Since a release after 8.1. */
aclError aclrtResetStreamResLimit(aclrtStream stream);
/** Lets the calling thread prepare operators for the cores of a stream. Since a release after 8.1. */
aclError aclrtUseStreamResInCurrentThread(aclrtStream stream);
/** Ends what aclrtUseStreamResInCurrentThread began. Since a release after 8.1. */
aclError aclrtUnuseStreamResInCurrentThread(aclrtStream stream);
/** How many cores the calling thread prepares operators for. Since a release after 8.1. */
aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t *value);
/** Stops the work of a device's streams and drops what is queued; waits `timeout` milliseconds, 0 for ever. */
aclError aclrtDeviceTaskAbort(int32_t deviceId, uint32_t timeout);
/** Memory with errors that cannot be corrected: at most `arraySize` ranges, and how many there are. */
aclError aclrtGetMemUceInfo(int32_t deviceId, aclrtMemUceInfo *memUceInfoArray, size_t arraySize, size_t *retSize);
/** What is wrong with a device. Since a release after 8.1. */
aclError aclrtGetErrorVerbose(int32_t deviceId, aclrtErrorInfo *errorInfo);
/** Repairs what aclrtGetErrorVerbose told. Since a release after 8.1. */
aclError aclrtRepairError(int32_t deviceId, const aclrtErrorInfo *errorInfo);

/* Contexts. */

/** Creates a context and makes it the calling thread's current one. */
aclError aclrtCreateContext(aclrtContext *context, int32_t deviceId);
/** Destroys a context made by aclrtCreateContext. */
aclError aclrtDestroyContext(aclrtContext context);
/** Makes a context the calling thread's current one. */
aclError aclrtSetCurrentContext(aclrtContext context);
/** The calling thread's current context. */
aclError aclrtGetCurrentContext(aclrtContext *context);
/** Whether a device has a default context: `active` is 1 or 0; `flags` is null. Since a release after 8.1. */
aclError aclrtGetPrimaryCtxState(int32_t deviceId, uint32_t *flags, int32_t *active);
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
/** The priority that the stream was made with. Since a release after 8.1. */
aclError aclrtStreamGetPriority(aclrtStream stream, uint32_t *priority);
/** The flags that the stream was made with. Since a release after 8.1. */
aclError aclrtStreamGetFlags(aclrtStream stream, uint32_t *flags);
/** The lowest and the highest priority of a stream. Since a release after 8.1. */
aclError aclrtDeviceGetStreamPriorityRange(int32_t *leastPriority, int32_t *greatestPriority);
/** Sets an attribute of a stream. Since a release after 8.1. */
aclError aclrtSetStreamAttribute(aclrtStream stream, aclrtStreamAttr stmAttrType, aclrtStreamAttrValue *value);
/** Reads an attribute of a stream. Since a release after 8.1. */
aclError aclrtGetStreamAttribute(aclrtStream stream, aclrtStreamAttr stmAttrType, aclrtStreamAttrValue *value);
/** Whether the stream goes on after a task that failed: ACL_CONTINUE_ON_FAILURE or ACL_STOP_ON_FAILURE. */
aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode);
/** Lets operators look for numbers out of range (1) or not (0). */
aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag);
/** Whether operators look for numbers out of range. */
aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t *flag);

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
/** When the latest record was reached, in microseconds since the device started. */
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *timestamp);

/* Memory. */

/** Allocates device memory; the size is padded by 32 bytes to a multiple of 32. Size 0 is an error. */
aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy policy);
/** Allocates device memory; the size is rounded to a multiple of 32 bytes. */
aclError aclrtMallocAlign32(void **devPtr, size_t size, aclrtMemMallocPolicy policy);
/** As aclrtMalloc, with attributes; `cfg` may be null. */
aclError aclrtMallocWithCfg(void **devPtr, size_t size, aclrtMemMallocPolicy policy, aclrtMallocConfig *cfg);
/** Frees device memory. */
aclError aclrtFree(void *devPtr);
/** Allocates pinned host memory. */
aclError aclrtMallocHost(void **hostPtr, size_t size);
/** As aclrtMallocHost, with attributes; `cfg` may be null. */
aclError aclrtMallocHostWithCfg(void **ptr, uint64_t size, aclrtMallocConfig *cfg);
/** Lets the device reach host memory; `devPtr` becomes its address on the device. */
aclError aclrtHostRegister(void *ptr, uint64_t size, aclrtHostRegisterType type, void **devPtr);
/** The same by ACL_HOST_REG_* flags. Since a release after 8.1. */
aclError aclrtHostRegisterV2(void *ptr, uint64_t size, uint32_t flag);
/** The address on the device of host memory that is registered. `flag` is 0. Since a release after 8.1. */
aclError aclrtHostGetDevicePointer(void *pHost, void **pDevice, uint32_t flag);
/** Ends what aclrtHostRegister or aclrtHostRegisterV2 began. */
aclError aclrtHostUnregister(void *ptr);
/** Where the memory at an address is. */
aclError aclrtPointerGetAttributes(const void *ptr, aclrtPtrAttributes *attributes);
/** Frees pinned host memory. */
aclError aclrtFreeHost(void *hostPtr);
/** Copies `count` bytes to a place that has `destMax`; returns when done. */
aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind);
/** Queues a copy; host memory has to be pinned and to stay until the stream is there. */
aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream);
/** Queues a copy, or waits for it where host memory is not pinned. */
aclError aclrtMemcpyAsyncWithCondition(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind,
                                       aclrtStream stream);
/**
 * Copies between the host and a device, in one direction; returns when done. `attrs[n]` is that of the copies from
 * `attrsIndexes[n]` on. `failIndex` becomes the copy that is wrong, SIZE_MAX if none is. Since a release after 8.1.
 */
aclError aclrtMemcpyBatch(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, size_t numBatches,
                          aclrtMemcpyBatchAttr *attrs, size_t *attrsIndexes, size_t numAttrs, size_t *failIndex);
/** Queues such copies; waits for them where host memory is not pinned. Since a release after 8.1. */
aclError aclrtMemcpyBatchAsync(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, size_t numBatches,
                               aclrtMemcpyBatchAttr *attrs, size_t *attrsIndexes, size_t numAttrs, size_t *failIndex,
                               aclrtStream stream);
/** Queues an advice for the device's cache; only ACL_RT_CMO_TYPE_PREFETCH is known. */
aclError aclrtCmoAsync(void *src, size_t size, aclrtCmoType cmoType, aclrtStream stream);
/** Sets `count` bytes of device memory that has `maxCount`; returns when done. */
aclError aclrtMemset(void *devPtr, size_t maxCount, int32_t value, size_t count);
/** Queues a set of device memory. */
aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream);
/** Free and total bytes of a kind of memory. */
aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total);

/* Virtual memory. */

/** Reserves a range of addresses; `alignment` is 0, `expectPtr` null and `flags` 0 or 1. */
aclError aclrtReserveMemAddress(void **virPtr, size_t size, size_t alignment, void *expectPtr, uint64_t flags);
/** Gives a range of addresses back, in which nothing is mapped. */
aclError aclrtReleaseMemAddress(void *virPtr);
/** Allocates physical memory. `flags` is 0. */
aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *prop, uint64_t flags);
/** Frees physical memory; what is mapped stays until it is unmapped. */
aclError aclrtFreePhysical(aclrtDrvMemHandle handle);
/** Lets addresses of a range show physical memory as a whole. `offset` and `flags` are 0. */
aclError aclrtMapMem(void *virPtr, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags);
/** Ends what aclrtMapMem began at an address. */
aclError aclrtUnmapMem(void *virPtr);
/** The unit of sizes and addresses of physical memory. */
aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *prop, aclrtMemGranularityOptions option,
                                          size_t *granularity);

/* Functions of the host, in a stream's order. */

/** Lets the thread with a number run the callbacks of a stream, in aclrtProcessReport. */
aclError aclrtSubscribeReport(uint64_t threadId, aclrtStream stream);
/** Ends what aclrtSubscribeReport began. */
aclError aclrtUnSubscribeReport(uint64_t threadId, aclrtStream stream);
/** Runs callbacks of the calling thread's streams; waits for one at most `timeout` milliseconds, -1 for ever. */
aclError aclrtProcessReport(int32_t timeout);
/** Queues a callback, which the stream waits for (ACL_CALLBACK_BLOCK) or not. */
aclError aclrtLaunchCallback(aclrtCallback fn, void *userData, aclrtCallbackBlockType blockType, aclrtStream stream);
/** Queues a function that a thread of the library's runs; the stream waits for it. Since a release after 8.1. */
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc fn, void *args);

/* Notifies and values in memory, all since a release after 8.1. */

/** Creates a notify: a flag that one stream raises and another one waits for and lowers. Since a release after 8.1. */
aclError aclrtCreateNotify(aclrtNotify *notify, uint64_t flag);
/** Destroys a notify. Since a release after 8.1. */
aclError aclrtDestroyNotify(aclrtNotify notify);
/** Raises a notify once the stream's work so far is done. Since a release after 8.1. */
aclError aclrtRecordNotify(aclrtNotify notify, aclrtStream stream);
/**
 * Lets later work of the stream wait until a notify is raised, and lowers it; `timeout` in seconds, 0 for ever.
 * Since a release after 8.1.
 */
aclError aclrtWaitAndResetNotify(aclrtNotify notify, aclrtStream stream, uint32_t timeout);
/** A number naming the notify. Since a release after 8.1. */
aclError aclrtGetNotifyId(aclrtNotify notify, uint32_t *notifyId);
/**
 * Writes eight bytes of device memory once the stream's work so far is done. `flag` is 0.
 * Since a release after 8.1.
 */
aclError aclrtValueWrite(void *devAddr, uint64_t value, uint32_t flag, aclrtStream stream);
/**
 * Lets later work of the stream wait for eight bytes of device memory; `flag` is an ACL_STREAM_WAIT_VALUE_* one.
 * Since a release after 8.1.
 */
aclError aclrtValueWait(void *devAddr, uint64_t value, uint32_t flag, aclrtStream stream);

/* Errors and limits. */

/** The latest error, which is then forgotten. */
aclError aclrtGetLastError(aclrtLastErrLevel level);
/** The latest error, which stays. */
aclError aclrtPeekAtLastError(aclrtLastErrLevel level);
/** Longest time an operator may run, in seconds; 0 is the longest that can be set. */
aclError aclrtSetOpExecuteTimeOut(uint32_t timeout);
/** The same in microseconds, and the time that applies. Since a release after 8.1. */
aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t *actualTimeout);
/** The unit of these times in microseconds: multiples of it by 1 to 254 apply. Since a release after 8.1. */
aclError aclrtGetOpTimeOutInterval(uint64_t *interval);
/** Longest time an operator may run, in milliseconds. Since a release after 8.1. */
aclError aclrtGetOpExecuteTimeout(uint32_t *const timeoutMs);
/** Longest time that aclrtStreamWaitEvent lets a stream wait, in seconds; 0 is for ever. */
aclError aclrtSetOpWaitTimeout(uint32_t timeout);

#ifdef __cplusplus
}
#endif

#endif
