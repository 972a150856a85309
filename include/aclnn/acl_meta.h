/*
 * Descriptors of tensors, lists, arrays and scalars, and reuse of executors (libnnopbase).
 * Written for this project from the documented ABI; no vendor text.
 *
 * A descriptor copies the dimensions and values it is made of and borrows device memory. It has to
 * live as long as the executors that were prepared with it.
 */
#ifndef ASCEND_ATTENTION_ACLNN_ACL_META_H_
#define ASCEND_ATTENTION_ACLNN_ACL_META_H_

#include "acl/acl_base.h"
#include "aclnn/aclnn_base.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A tensor: element type, shape, strides and device address. */
typedef struct aclTensor aclTensor;
/** A single number. */
typedef struct aclScalar aclScalar;
/** An array of int64_t in host memory. */
typedef struct aclIntArray aclIntArray;
/** An array of float in host memory. */
typedef struct aclFloatArray aclFloatArray;
/** An array of bool in host memory. */
typedef struct aclBoolArray aclBoolArray;
/** A list of tensors. */
typedef struct aclTensorList aclTensorList;
/** A list of scalars. */
typedef struct aclScalarList aclScalarList;

/* Making and destroying. */

/** Describes a tensor. `stride` and `offset` count elements; `stride` null means contiguous. Null on failure. */
aclTensor *aclCreateTensor(const int64_t *viewDims, uint64_t viewDimsNum, aclDataType dataType,
                           const int64_t *stride, int64_t offset, aclFormat format, const int64_t *storageDims,
                           uint64_t storageDimsNum, void *tensorData);
/** Describes one number of the given type. */
aclScalar *aclCreateScalar(void *value, aclDataType dataType);
/** Copies an array of integers. */
aclIntArray *aclCreateIntArray(const int64_t *value, uint64_t size);
/** Copies an array of floats. */
aclFloatArray *aclCreateFloatArray(const float *value, uint64_t size);
/** Copies an array of bools. */
aclBoolArray *aclCreateBoolArray(const bool *value, uint64_t size);
/** Makes a list of tensors, which then belong to the list. */
aclTensorList *aclCreateTensorList(const aclTensor *const *value, uint64_t size);
/** Makes a list of scalars. */
aclScalarList *aclCreateScalarList(const aclScalar *const *value, uint64_t size);

/** Destroys a tensor's description, not its memory. */
aclnnStatus aclDestroyTensor(const aclTensor *tensor);
/** Destroys a scalar. */
aclnnStatus aclDestroyScalar(const aclScalar *scalar);
/** Destroys an aclIntArray. */
aclnnStatus aclDestroyIntArray(const aclIntArray *array);
/** Destroys an aclFloatArray. */
aclnnStatus aclDestroyFloatArray(const aclFloatArray *array);
/** Destroys an aclBoolArray. */
aclnnStatus aclDestroyBoolArray(const aclBoolArray *array);
/** Destroys a list and the tensors in it. */
aclnnStatus aclDestroyTensorList(const aclTensorList *array);
/** Destroys a list and the scalars in it. */
aclnnStatus aclDestroyScalarList(const aclScalarList *array);

/* Asking. */

/** Dimensions of the view, in an array that the library allocates with `new[]`. */
aclnnStatus aclGetViewShape(const aclTensor *tensor, int64_t **viewDims, uint64_t *viewDimsNum);
/** Dimensions of the storage, in an array that the library allocates with `new[]`. */
aclnnStatus aclGetStorageShape(const aclTensor *tensor, int64_t **storageDims, uint64_t *storageDimsNum);
/** Strides of the view in elements, in an array that the library allocates with `new[]`. */
aclnnStatus aclGetViewStrides(const aclTensor *tensor, int64_t **stridesValue, uint64_t *stridesNum);
/** Offset of the view in elements. */
aclnnStatus aclGetViewOffset(const aclTensor *tensor, int64_t *offset);
/** Format of the view. */
aclnnStatus aclGetFormat(const aclTensor *tensor, aclFormat *format);
/** Element type. */
aclnnStatus aclGetDataType(const aclTensor *tensor, aclDataType *dataType);
/** Number of elements. */
aclnnStatus aclGetIntArraySize(const aclIntArray *array, uint64_t *size);
/** Number of elements. */
aclnnStatus aclGetFloatArraySize(const aclFloatArray *array, uint64_t *size);
/** Number of elements. */
aclnnStatus aclGetBoolArraySize(const aclBoolArray *array, uint64_t *size);
/** Number of tensors. */
aclnnStatus aclGetTensorListSize(const aclTensorList *tensorList, uint64_t *size);
/** Number of scalars. */
aclnnStatus aclGetScalarListSize(const aclScalarList *scalarList, uint64_t *size);

/* Changing. */

/** Describes an existing tensor anew; the arguments are those of aclCreateTensor. */
aclnnStatus aclInitTensor(aclTensor *tensor, const int64_t *viewDims, uint64_t viewDimsNum, aclDataType dataType,
                          const int64_t *stride, int64_t offset, aclFormat format, const int64_t *storageDims,
                          uint64_t storageDimsNum, void *tensorDataAddr);
/** Changes a tensor's device address. */
aclnnStatus aclSetRawTensorAddr(aclTensor *tensor, void *addr);
/** A tensor's device address. */
aclnnStatus aclGetRawTensorAddr(const aclTensor *tensor, void **addr);

/* Reuse of executors: only addresses may change between two runs. */

/** Lets an executor run more than once; right after phase one. */
aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor *executor);
/** Destroys a repeatable executor; an ordinary one is gone after phase two. */
aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor *executor);
/** New address of the input at `index` among the operator's inputs. */
aclnnStatus aclSetInputTensorAddr(aclOpExecutor *executor, size_t index, aclTensor *tensor, void *addr);
/** New address of the output at `index` among the operator's outputs. */
aclnnStatus aclSetOutputTensorAddr(aclOpExecutor *executor, size_t index, aclTensor *tensor, void *addr);
/** New address of the tensor at `index` among the operator's inputs and outputs. */
aclnnStatus aclSetTensorAddr(aclOpExecutor *executor, size_t index, aclTensor *tensor, void *addr);
/** New address of element `relativeIndex` of the input list at `irIndex`. */
aclnnStatus aclSetDynamicInputTensorAddr(aclOpExecutor *executor, size_t irIndex, size_t relativeIndex,
                                         aclTensorList *tensors, void *addr);
/** New address of element `relativeIndex` of the output list at `irIndex`. */
aclnnStatus aclSetDynamicOutputTensorAddr(aclOpExecutor *executor, size_t irIndex, size_t relativeIndex,
                                          aclTensorList *tensors, void *addr);
/** New address of element `relativeIndex` of the list at `irIndex` among inputs and outputs. */
aclnnStatus aclSetDynamicTensorAddr(aclOpExecutor *executor, size_t irIndex, size_t relativeIndex,
                                    aclTensorList *tensors, void *addr);

/** Old name of aclSetInputTensorAddr. Since a release after 8.1. */
aclnnStatus AclSetInputTensorAddr(aclOpExecutor *executor, size_t index, aclTensor *tensor, void *addr);
/** Old name of aclSetOutputTensorAddr. Since a release after 8.1. */
aclnnStatus AclSetOutputTensorAddr(aclOpExecutor *executor, size_t index, aclTensor *tensor, void *addr);
/** Old name of aclSetTensorAddr. Since a release after 8.1. */
aclnnStatus AclSetTensorAddr(aclOpExecutor *executor, size_t index, aclTensor *tensor, void *addr);
/** Old name of aclSetDynamicInputTensorAddr. Since a release after 8.1. */
aclnnStatus AclSetDynamicInputTensorAddr(aclOpExecutor *executor, size_t irIndex, size_t relativeIndex,
                                         aclTensorList *tensors, void *addr);
/** Old name of aclSetDynamicOutputTensorAddr. Since a release after 8.1. */
aclnnStatus AclSetDynamicOutputTensorAddr(aclOpExecutor *executor, size_t irIndex, size_t relativeIndex,
                                          aclTensorList *tensors, void *addr);
/** Old name of aclSetDynamicTensorAddr. Since a release after 8.1. */
aclnnStatus AclSetDynamicTensorAddr(aclOpExecutor *executor, size_t irIndex, size_t relativeIndex,
                                    aclTensorList *tensors, void *addr);

#ifdef __cplusplus
}
#endif

#endif
