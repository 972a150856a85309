/*
 * Status, executor and initialisation of the aclnn C interface (libnnopbase).
 * Written for this project from the documented ABI; no vendor text.
 */
#ifndef ASCEND_ATTENTION_ACLNN_ACLNN_BASE_H_
#define ASCEND_ATTENTION_ACLNN_ACLNN_BASE_H_

#include "acl/acl_base.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Status of an aclnn call: 0 is success. Its numbers are not those of aclError. */
typedef int32_t aclnnStatus;

/** What phase one of an operator prepared and phase two runs. */
typedef struct aclOpExecutor aclOpExecutor;

#define ACLNN_SUCCESS 0
#define ACLNN_ERR_PARAM_NULLPTR 161001
#define ACLNN_ERR_PARAM_INVALID 161002
#define ACLNN_ERR_RUNTIME_ERROR 361001
#define ACLNN_ERR_INNER 561000
#define ACLNN_ERR_INNER_INFERSHAPE_ERROR 561001
#define ACLNN_ERR_INNER_TILING_ERROR 561002
#define ACLNN_ERR_INNER_FIND_KERNEL_ERROR 561003
#define ACLNN_ERR_INNER_CREATE_EXECUTOR 561101
#define ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR 561102
#define ACLNN_ERR_INNER_NULLPTR 561103
#define ACLNN_ERR_INNER_WRONG_ATTR_INFO_SIZE 561104
#define ACLNN_ERR_INNER_KEY_CONFILICT 561105
#define ACLNN_ERR_INNER_INVALID_IMPL_MODE 561106
#define ACLNN_ERR_INNER_OPP_PATH_NOT_FOUND 561107
#define ACLNN_ERR_INNER_LOAD_JSON_FAILED 561108
#define ACLNN_ERR_INNER_JSON_VALUE_NOT_FOUND 561109
#define ACLNN_ERR_INNER_JSON_FORMAT_INVALID 561110
#define ACLNN_ERR_INNER_JSON_DTYPE_INVALID 561111
#define ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND 561112
#define ACLNN_ERR_INNER_OP_FILE_INVALID 561113
#define ACLNN_ERR_INNER_ATTR_NUM_OUT_OF_BOUND 561114
#define ACLNN_ERR_INNER_ATTR_LEN_NOT_ENOUGH 561115
#define ACLNN_ERR_INNER_INPUT_NUM_IN_JSON_NOT_MATCH 561116
#define ACLNN_ERR_INNER_OUTPUT_NUM_IN_JSON_NOT_MATCH 561117
#define ACLNN_ERR_INNER_STATIC_WORKSPACE_INVALID 561118
#define ACLNN_ERR_INNER_STATIC_BLOCK_DIM_INVALID 561119

/** Initialises the operator libraries; optional after aclInit. `configPath` may be null. */
aclnnStatus aclnnInit(const char *configPath);
/** Ends what aclnnInit began. */
aclnnStatus aclnnFinalize(void);

#ifdef __cplusplus
}
#endif

/* As in the toolkit, whoever includes this header has the descriptors too. They need what stands above. */
#include "aclnn/acl_meta.h"

#endif
