/*
 * HCCL: communicators, and the collectives between their ranks (libhccl; communicators of newer releases: libhcomm).
 * Written for this project from the documented ABI; no vendor text.
 *
 * Counts are numbers of elements. Operators are queued on the stream, which belongs to the device of the rank; an
 * operator whose count is 0 does nothing. All ranks call the same operators in the same order.
 */
#ifndef ASCEND_ATTENTION_HCCL_HCCL_H_
#define ASCEND_ATTENTION_HCCL_HCCL_H_

#include "acl/acl.h"
#include "hccl/hccl_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Communicators. */

/** Makes the information with which the ranks of one communicator find each other. It is good for one communicator. */
HcclResult HcclGetRootInfo(HcclRootInfo *rootInfo);
/** Joins a communicator as `rank` of `nRanks`, on the calling thread's device. Returns when all ranks have joined. */
HcclResult HcclCommInitRootInfo(uint32_t nRanks, const HcclRootInfo *rootInfo, uint32_t rank, HcclComm *comm);
/** HcclCommInitRootInfo with settings; `config` must not be null. */
HcclResult HcclCommInitRootInfoConfig(
    uint32_t nRanks,
    const HcclRootInfo *rootInfo,
    uint32_t rank,
    const HcclCommConfig *config,
    HcclComm *comm);
/** Makes a communicator of devices of this process; rank i is on entry i of devices, and becomes entry i of comms. */
HcclResult HcclCommInitAll(uint32_t ndev, int32_t *devices, HcclComm *comms);
/**
 * Makes a communicator of some ranks of `*parent`, which is no such communicator itself. `rankIds` are these ranks in
 * rising order, `subCommRankId` is the index of the caller among them; every rank in it calls this, and a rank that is
 * not in it may call it with null and 0xFFFFFFFF. `subCommId` tells the communicators of one parent apart.
 */
HcclResult HcclCreateSubCommConfig(
    HcclComm *parent,
    uint32_t rankNum,
    uint32_t *rankIds,
    uint64_t subCommId,
    uint32_t subCommRankId,
    HcclCommConfig *config,
    HcclComm *comm);
/** Fills in the settings of a communicator: those of the process. */
static inline void HcclCommConfigInit(HcclCommConfig *config)
{
    HcclCommConfigInfo info = {sizeof(HcclCommConfig), HCCL_COMM_CONFIG_MAGIC_WORD, HCCL_COMM_CONFIG_VERSION, 0};
    const char *from = (const char *)&info;
    char *to = (char *)config;
    size_t i;
    for (i = 0; i < sizeof(HcclCommConfig); i++) {
        to[i] = i < sizeof(info) ? from[i] : 0;
    }
    config->hcclBufferSize = HCCL_COMM_CONFIG_NOT_SET;
    config->hcclDeterministic = HCCL_COMM_CONFIG_NOT_SET;
    config->hcclRdmaTrafficClass = HCCL_COMM_CONFIG_NOT_SET;
    config->hcclRdmaServiceLevel = HCCL_COMM_CONFIG_NOT_SET;
}
/** Ends this rank's part. Null is allowed. */
HcclResult HcclCommDestroy(HcclComm comm);
/** The number of ranks. */
HcclResult HcclGetRankSize(HcclComm comm, uint32_t *rankSize);
/** This rank. */
HcclResult HcclGetRankId(HcclComm comm, uint32_t *rank);
/** Writes the name of the communicator, at most 128 bytes with its NUL. */
HcclResult HcclGetCommName(HcclComm comm, char *commName);
/** Tells of failures of the network since the communicator began. */
HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult *asyncError);
/** The text of a result; it is never null. */
const char *HcclGetErrorString(HcclResult code);
/** A setting of HcclCommConfig exists if its number is below this one. */
uint32_t HcclGetCommConfigCapability(void);
/** Changes a setting of the process. */
HcclResult HcclSetConfig(HcclConfig config, HcclConfigValue configValue);
/** Reads a setting of the process. */
HcclResult HcclGetConfig(HcclConfig config, HcclConfigValue *configValue);

/* Operators. */

/** Waits on the stream until all ranks have come. */
HcclResult HcclBarrier(HcclComm comm, aclrtStream stream);
/** Reduces `count` elements of each rank to every rank. */
HcclResult HcclAllReduce(
    void *sendBuf,
    void *recvBuf,
    uint64_t count,
    HcclDataType dataType,
    HcclReduceOp op,
    HcclComm comm,
    aclrtStream stream);
/** Reduces `count` elements of each rank to the root. */
HcclResult HcclReduce(
    void *sendBuf,
    void *recvBuf,
    uint64_t count,
    HcclDataType dataType,
    HcclReduceOp op,
    uint32_t root,
    HcclComm comm,
    aclrtStream stream);
/** Copies `count` elements of the root to every rank. */
HcclResult HcclBroadcast(
    void *buf, uint64_t count, HcclDataType dataType, uint32_t root, HcclComm comm, aclrtStream stream);
/** Gathers `sendCount` elements of each rank on every rank, in the order of the ranks. */
HcclResult HcclAllGather(
    void *sendBuf, void *recvBuf, uint64_t sendCount, HcclDataType dataType, HcclComm comm, aclrtStream stream);
/** HcclAllGather with parts of their own sizes. `recvCounts`, `recvDispls`: uint64_t of each rank, on the host. */
HcclResult HcclAllGatherV(
    void *sendBuf,
    uint64_t sendCount,
    void *recvBuf,
    const void *recvCounts,
    const void *recvDispls,
    HcclDataType dataType,
    HcclComm comm,
    aclrtStream stream);
/** Reduces size x `recvCount` elements of each rank; rank r receives part r. */
HcclResult HcclReduceScatter(
    void *sendBuf,
    void *recvBuf,
    uint64_t recvCount,
    HcclDataType dataType,
    HcclReduceOp op,
    HcclComm comm,
    aclrtStream stream);
/** HcclReduceScatter with parts of their own sizes. `sendCounts`, `sendDispls`: uint64_t of each rank, on the host. */
HcclResult HcclReduceScatterV(
    void *sendBuf,
    const void *sendCounts,
    const void *sendDispls,
    void *recvBuf,
    uint64_t recvCount,
    HcclDataType dataType,
    HcclReduceOp op,
    HcclComm comm,
    aclrtStream stream);
/** Hands part r of the root's size x `recvCount` elements to rank r. `sendBuf` may be null on other ranks. */
HcclResult HcclScatter(
    void *sendBuf,
    void *recvBuf,
    uint64_t recvCount,
    HcclDataType dataType,
    uint32_t root,
    HcclComm comm,
    aclrtStream stream);
/** Exchanges `sendCount` elements between each two ranks. Both counts and both types are equal. */
HcclResult HcclAlltoAll(
    const void *sendBuf,
    uint64_t sendCount,
    HcclDataType sendType,
    const void *recvBuf,
    uint64_t recvCount,
    HcclDataType recvType,
    HcclComm comm,
    aclrtStream stream);
/** Exchanges numbers of elements of their own. The lists are of uint64_t, one for each rank, in host memory. */
HcclResult HcclAlltoAllV(
    const void *sendBuf,
    const void *sendCounts,
    const void *sdispls,
    HcclDataType sendType,
    const void *recvBuf,
    const void *recvCounts,
    const void *rdispls,
    HcclDataType recvType,
    HcclComm comm,
    aclrtStream stream);
/**
 * HcclAlltoAllV without gaps: the matrix is of uint64_t, in host memory; row i is what rank i sends to each rank.
 * Since a release after 8.1.
 */
HcclResult HcclAlltoAllVC(
    const void *sendBuf,
    const void *sendCountMatrix,
    HcclDataType sendType,
    const void *recvBuf,
    HcclDataType recvType,
    HcclComm comm,
    aclrtStream stream);
/** Sends elements to a rank, and waits for it to receive them. */
HcclResult HcclSend(
    void *sendBuf, uint64_t count, HcclDataType dataType, uint32_t destRank, HcclComm comm, aclrtStream stream);
/** Receives elements from a rank. */
HcclResult HcclRecv(
    void *recvBuf, uint64_t count, HcclDataType dataType, uint32_t srcRank, HcclComm comm, aclrtStream stream);
/** Sends and receives at once; items do not wait for each other. */
HcclResult HcclBatchSendRecv(HcclSendRecvItem *sendRecvInfo, uint32_t itemNum, HcclComm comm, aclrtStream stream);
/**
 * Begins a group of the calling thread: its HcclSend and HcclRecv do not wait for each other, and are queued when the
 * group ends. Groups may be in groups. Since a release after 8.1.
 */
HcclResult HcclGroupStart(void);
/** Ends a group of the calling thread, and queues what the outermost one has. Since a release after 8.1. */
HcclResult HcclGroupEnd(void);

#ifdef __cplusplus
/*
 * What C++ programs call and the emulation does not have: each says so by HCCL_E_NOT_SUPPORT. Ranks of a file, the end
 * and the new beginning of a communicator's work, and memory that programs map for a communicator by themselves.
 */
HcclResult HcclCommInitClusterInfo(const char *clusterInfo, uint32_t rank, HcclComm *comm);
HcclResult HcclCommInitClusterInfoConfig(
    const char *clusterInfo, uint32_t rank, HcclCommConfig *config, HcclComm *comm);
HcclResult HcclCommSuspend(HcclComm comm);
HcclResult HcclCommResume(HcclComm comm);
HcclResult HcclCommSetMemoryRange(HcclComm comm, void *baseVirPtr, size_t size, size_t alignment, uint64_t flags);
HcclResult HcclCommUnsetMemoryRange(HcclComm comm, void *baseVirPtr);
HcclResult HcclCommActivateCommMemory(
    HcclComm comm, void *virPtr, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags);
HcclResult HcclCommDeactivateCommMemory(HcclComm comm, void *virPtr);

}
#endif

#endif
