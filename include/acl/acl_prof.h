/*
 * The profiler of the ACL C interface, as programs start it around what they measure (libascendcl).
 * Written for this project from the documented ABI; no vendor text.
 *
 * The emulation has no profiler: each function says so by its result and by aclGetRecentErrMsg.
 */
#ifndef ASCEND_ATTENTION_ACL_ACL_PROF_H_
#define ASCEND_ATTENTION_ACL_ACL_PROF_H_

#include "acl/acl_base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What is collected: bits of aclprofCreateConfig's last argument. */
#define ACL_PROF_ACL_API 0x1ULL
#define ACL_PROF_TASK_TIME 0x2ULL
#define ACL_PROF_AICORE_METRICS 0x4ULL
#define ACL_PROF_AICPU 0x8ULL
#define ACL_PROF_L2CACHE 0x10ULL
#define ACL_PROF_HCCL_TRACE 0x20ULL
#define ACL_PROF_TRAINING_TRACE 0x40ULL
#define ACL_PROF_MSPROFTX 0x80ULL
#define ACL_PROF_RUNTIME_API 0x100ULL

/** What is counted of the cores. */
typedef enum {
    ACL_AICORE_ARITHMETIC_UTILIZATION = 0,
    ACL_AICORE_PIPE_UTILIZATION = 1,
    ACL_AICORE_MEMORY_BANDWIDTH = 2,
    ACL_AICORE_L0B_AND_WIDTH = 3,
    ACL_AICORE_RESOURCE_CONFLICT_RATIO = 4,
    ACL_AICORE_MEMORY_UB = 5,
    ACL_AICORE_L2_CACHE = 6,
    ACL_AICORE_PIPE_EXECUTE_UTILIZATION = 7,
    ACL_AICORE_MEMORY_ACCESS = 8,
    ACL_AICORE_NONE = 0xFF
} aclprofAicoreMetrics;

typedef struct aclprofConfig aclprofConfig;
typedef struct aclprofAicoreEvents aclprofAicoreEvents;

/** Begins profiling, with results in a folder. */
aclError aclprofInit(const char *profilerResultPath, size_t length);

/** Says what is collected of which devices; null on failure. */
aclprofConfig *aclprofCreateConfig(uint32_t *deviceIdList, uint32_t deviceNums, aclprofAicoreMetrics aicoreMetrics,
                                   const aclprofAicoreEvents *aicoreEvents, uint64_t dataTypeConfig);

/** Destroys what aclprofCreateConfig has made. */
aclError aclprofDestroyConfig(const aclprofConfig *profilerConfig);

/** Begins to collect. */
aclError aclprofStart(const aclprofConfig *profilerConfig);

/** Ends what aclprofStart has begun. */
aclError aclprofStop(const aclprofConfig *profilerConfig);

/** Ends profiling. */
aclError aclprofFinalize(void);

#ifdef __cplusplus
}
#endif

#endif
