/*
 * A program that gives memory back while queued work uses it, and does not look at what the call says. Prints the status of
 * each call behind it that waits or copies, then resets the device and goes on.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "acl/acl.h"

enum { BYTES = 64 };

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        int status_ = (int)(call);                                                                                     \
        if (status_ != 0) {                                                                                            \
            const char *text_ = aclGetRecentErrMsg();                                                                  \
            fprintf(stderr, "%s: %d: %s\n", #call, status_, text_ == NULL ? "no message" : text_);                     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static void tell(const char *what, int status)
{
    const char *text = status == 0 ? NULL : aclGetRecentErrMsg();
    printf("%s %d %s\n", what, status, text == NULL ? "" : text);
}

int main(void)
{
    char host[BYTES];
    void *memory = NULL;
    void *other = NULL;
    aclrtStream stream = NULL;
    aclrtEvent event = NULL;

    memset(host, 3, sizeof(host));
    CHECK(aclInit(NULL));
    CHECK(aclrtSetDevice(0));
    CHECK(aclrtCreateStream(&stream));
    CHECK(aclrtCreateEvent(&event));
    CHECK(aclrtMalloc(&memory, BYTES, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK(aclrtMalloc(&other, BYTES, ACL_MEM_MALLOC_HUGE_FIRST));
    /* Memory that is not pinned: the copy waits, and is right. */
    CHECK(aclrtMemcpyAsync(other, BYTES, host, BYTES, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    CHECK(aclrtSynchronizeStream(stream));

    CHECK(aclrtMemsetAsync(memory, BYTES, 5, BYTES, stream));
    (void)aclrtFree(memory);
    CHECK(aclrtRecordEvent(event, stream));
    tell("stream", (int)aclrtSynchronizeStream(stream));
    tell("event", (int)aclrtSynchronizeEvent(event));
    tell("device", (int)aclrtSynchronizeDevice());
    tell("copy", (int)aclrtMemcpy(host, BYTES, other, BYTES, ACL_MEMCPY_DEVICE_TO_HOST));
    tell("async", (int)aclrtMemcpyAsync(host, BYTES, other, BYTES, ACL_MEMCPY_DEVICE_TO_HOST, stream));
    /* Another device of the thread does not hide it. */
    CHECK(aclrtSetDevice(1));
    tell("elsewhere", (int)aclrtSynchronizeEvent(event));
    CHECK(aclrtResetDevice(1));
    CHECK(aclrtSetDevice(0));
    printf("host %d\n", host[0]);

    CHECK(aclrtDestroyEvent(event));
    CHECK(aclrtDestroyStream(stream));
    CHECK(aclrtResetDeviceForce(0));
    CHECK(aclrtSetDevice(0));
    CHECK(aclrtMalloc(&memory, BYTES, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK(aclrtMemset(memory, BYTES, 7, BYTES));
    tell("again", (int)aclrtMemcpy(host, BYTES, memory, BYTES, ACL_MEMCPY_DEVICE_TO_HOST));
    printf("host %d\n", host[0]);
    CHECK(aclrtFree(memory));
    CHECK(aclrtResetDevice(0));
    CHECK(aclFinalize());
    printf("done\n");
    return 0;
}
