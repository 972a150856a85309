/* Two ranks in one process: an all-gather, a sum, and settings as programs fill them in. */
#include <stdio.h>

#include "acl/acl.h"
#include "hccl/hccl.h"

#define RANKS 2
#define COUNT 3

#define CHECK(call)                                          \
    do {                                                     \
        int status = (int)(call);                            \
        if (status != 0) {                                   \
            printf("%s: %d %s\n", #call, status, aclGetRecentErrMsg()); \
            return 1;                                        \
        }                                                    \
    } while (0)

int main(void)
{
    int32_t devices[RANKS] = {0, 1};
    HcclComm comms[RANKS];
    aclrtStream streams[RANKS];
    void *send[RANKS], *gathered[RANKS], *sum[RANKS];
    HcclCommConfig config;
    int rank, at;

    HcclCommConfigInit(&config);
    printf("config %u %u\n", (unsigned)sizeof(config), (unsigned)config.hcclBufferSize);
    CHECK(aclInit(NULL));
    for (rank = 0; rank < RANKS; rank++) {
        float values[COUNT];
        for (at = 0; at < COUNT; at++) {
            values[at] = (float)(10 * rank + at);
        }
        CHECK(aclrtSetDevice(devices[rank]));
        CHECK(aclrtCreateStream(&streams[rank]));
        CHECK(aclrtMalloc(&send[rank], sizeof(values), ACL_MEM_MALLOC_HUGE_FIRST));
        CHECK(aclrtMalloc(&gathered[rank], RANKS * sizeof(values), ACL_MEM_MALLOC_HUGE_FIRST));
        CHECK(aclrtMalloc(&sum[rank], sizeof(values), ACL_MEM_MALLOC_HUGE_FIRST));
        CHECK(aclrtMemcpy(send[rank], sizeof(values), values, sizeof(values), ACL_MEMCPY_HOST_TO_DEVICE));
    }
    CHECK(HcclCommInitAll(RANKS, devices, comms));
    for (rank = 0; rank < RANKS; rank++) {
        CHECK(aclrtSetDevice(devices[rank]));
        CHECK(HcclAllGather(send[rank], gathered[rank], COUNT, HCCL_DATA_TYPE_FP32, comms[rank], streams[rank]));
        CHECK(HcclAllReduce(
            send[rank], sum[rank], COUNT, HCCL_DATA_TYPE_FP32, HCCL_REDUCE_SUM, comms[rank], streams[rank]));
    }
    for (rank = 0; rank < RANKS; rank++) {
        float values[RANKS * COUNT], sums[COUNT];
        CHECK(aclrtSetDevice(devices[rank]));
        CHECK(aclrtSynchronizeStream(streams[rank]));
        CHECK(aclrtMemcpy(values, sizeof(values), gathered[rank], sizeof(values), ACL_MEMCPY_DEVICE_TO_HOST));
        CHECK(aclrtMemcpy(sums, sizeof(sums), sum[rank], sizeof(sums), ACL_MEMCPY_DEVICE_TO_HOST));
        for (at = 0; at < RANKS * COUNT; at++) {
            printf("gathered %d %g\n", rank, values[at]);
        }
        for (at = 0; at < COUNT; at++) {
            printf("sum %d %g\n", rank, sums[at]);
        }
        CHECK(HcclCommDestroy(comms[rank]));
        CHECK(aclrtFree(send[rank]));
        CHECK(aclrtFree(gathered[rank]));
        CHECK(aclrtFree(sum[rank]));
        CHECK(aclrtDestroyStream(streams[rank]));
    }
    printf("%d %s\n", (int)HcclCommDestroy(streams[0]), HcclGetErrorString(HCCL_E_PARA));
    CHECK(aclFinalize());
    printf("done\n");
    return 0;
}
