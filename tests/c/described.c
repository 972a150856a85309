/* Descriptors of every kind, some of them mistakes: for those who watch the calls. Computes nothing. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "acl/acl.h"
#include "aclnn/acl_meta.h"

/* An operator that the headers do not have. */
aclnnStatus aclnnInplaceFillScalarGetWorkspaceSize(aclTensor *selfRef, const aclScalar *value, uint64_t *workspaceSize,
                                                   aclOpExecutor **executor);

static void expect(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

int main(void)
{
    const int64_t shape[2] = {2, 3};
    const int64_t strides[2] = {1, 2};
    const int64_t storage[1] = {12};
    const float numbers[2] = {0.1F, (float)INFINITY};
    const bool flags[2] = {true, false};
    static int64_t lengths[2000];
    aclFormat format = ACL_FORMAT_UNDEFINED;
    uint64_t size = 0;

    for (int64_t i = 0; i < 2000; ++i) {
        lengths[i] = i;
    }
    aclTensor *view =
        aclCreateTensor(shape, 2, ACL_BF16, strides, 4, ACL_FORMAT_NCL, storage, 1, (void *)(uintptr_t)0x1000);
    expect(view != NULL && aclGetFormat(view, &format) == 0 && format == ACL_FORMAT_NCL, "a view");
    expect(aclGetFormat(NULL, &format) != 0, "a null tensor");
    expect(aclGetFormat(view, NULL) != 0, "a null result");

    aclIntArray *ints = aclCreateIntArray(lengths, 2000);
    expect(ints != NULL && aclGetIntArraySize(ints, &size) == 0 && size == 2000, "an array of integers");
    expect(aclCreateIntArray(lengths, UINT64_MAX) == NULL, "a length that nothing has");
    expect(aclCreateIntArray(NULL, 3) == NULL, "a null array");
    aclFloatArray *floats = aclCreateFloatArray(numbers, 2);
    aclBoolArray *bools = aclCreateBoolArray(flags, 2);
    expect(floats != NULL && bools != NULL, "arrays");

    float two_and_a_half = 2.5F;
    aclOpExecutor *executor = NULL;
    aclScalar *scalar = aclCreateScalar(&two_and_a_half, ACL_FLOAT);
    expect(aclnnInplaceFillScalarGetWorkspaceSize(NULL, scalar, &size, &executor) != 0, "no tensor to fill");
    expect(aclDestroyScalar(scalar) == 0, "the end of a scalar");

    const aclTensor *members[1];
    members[0] = view;
    aclTensorList *list = aclCreateTensorList(members, 1);
    expect(list != NULL && aclGetTensorListSize(list, &size) == 0 && size == 1, "a list");
    expect(aclDestroyTensorList(list) == 0, "the end of a list");
    expect(aclDestroyTensor(view) != 0, "a tensor that its list has destroyed");
    expect(aclDestroyIntArray(ints) == 0 && aclDestroyFloatArray(floats) == 0 && aclDestroyBoolArray(bools) == 0,
           "the end of arrays");
    printf("done\n");
    return 0;
}
