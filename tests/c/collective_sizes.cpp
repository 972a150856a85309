// Collectives over devices, from a few bytes to some MiB: warm-up, events around the timed calls, results checked.
// Arguments: `threads` or `processes`, what each rank is, and the number of ranks.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "hccl/hccl.h"

namespace {

constexpr uint64_t kLargest = uint64_t{4} << 20;
constexpr int kWarmUp = 1;
constexpr int kTimed = 3;

#define CHECK(call)                                                              \
    do {                                                                         \
        const int status = static_cast<int>(call);                               \
        if (status != 0) {                                                       \
            std::fprintf(stderr, "%s: %d %s\n", #call, status, aclGetRecentErrMsg()); \
            std::exit(1);                                                        \
        }                                                                        \
    } while (0)

struct Rank {
    uint32_t rank;
    uint32_t ranks;
    HcclComm comm;
    aclrtStream stream;
    void *send;
    void *receive;
};

// What a rank has at an index: small numbers, whose sums are exact.
float value(uint32_t rank, uint64_t at) { return static_cast<float>((at * 7 + rank * 3) % 64); }

struct Operation {
    const char *name;
    // Elements sent and received for a part of so many elements.
    std::function<uint64_t(const Rank &, uint64_t)> sent, received;
    std::function<HcclResult(const Rank &, uint64_t)> call;
    // What a rank gets at an index.
    std::function<float(const Rank &, uint64_t, uint64_t)> expected;
};

float sum(uint32_t ranks, uint64_t at) {
    float total = 0;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        total += value(rank, at);
    }
    return total;
}

std::vector<Operation> operations() {
    const auto part = [](const Rank &, uint64_t count) { return count; };
    const auto all = [](const Rank &one, uint64_t count) { return count * one.ranks; };
    const HcclDataType type = HCCL_DATA_TYPE_FP32;
    return {
        {"all_reduce", part, part,
         [=](const Rank &one, uint64_t count) {
             return HcclAllReduce(one.send, one.receive, count, type, HCCL_REDUCE_SUM, one.comm, one.stream);
         },
         [](const Rank &one, uint64_t, uint64_t at) { return sum(one.ranks, at); }},
        {"all_gather", part, all,
         [=](const Rank &one, uint64_t count) {
             return HcclAllGather(one.send, one.receive, count, type, one.comm, one.stream);
         },
         [](const Rank &, uint64_t count, uint64_t at) {
             return value(static_cast<uint32_t>(at / count), at % count);
         }},
        {"reduce_scatter", all, part,
         [=](const Rank &one, uint64_t count) {
             return HcclReduceScatter(one.send, one.receive, count, type, HCCL_REDUCE_SUM, one.comm, one.stream);
         },
         [](const Rank &one, uint64_t count, uint64_t at) { return sum(one.ranks, one.rank * count + at); }},
        {"alltoall", all, all,
         [=](const Rank &one, uint64_t count) {
             return HcclAlltoAll(one.send, count, type, one.receive, count, type, one.comm, one.stream);
         },
         [](const Rank &one, uint64_t count, uint64_t at) {
             return value(static_cast<uint32_t>(at / count), one.rank * count + at % count);
         }},
        // The root's buffer goes to the others; each copies what it has first.
        {"broadcast", part, part,
         [=](const Rank &one, uint64_t count) {
             const uint64_t bytes = count * sizeof(float);
             CHECK(aclrtMemcpyAsync(one.receive, bytes, one.send, bytes, ACL_MEMCPY_DEVICE_TO_DEVICE, one.stream));
             return HcclBroadcast(one.receive, count, type, one.ranks - 1, one.comm, one.stream);
         },
         [](const Rank &one, uint64_t, uint64_t at) { return value(one.ranks - 1, at); }},
    };
}

void measure(const Rank &one, const Operation &operation, uint64_t bytes) {
    const uint64_t count = bytes / sizeof(float);
    const uint64_t sent = operation.sent(one, count), received = operation.received(one, count);
    std::vector<float> host(sent), got(received);
    for (uint64_t at = 0; at < sent; at++) {
        host[at] = value(one.rank, at);
    }
    const uint64_t sent_bytes = sent * sizeof(float), received_bytes = received * sizeof(float);
    CHECK(aclrtMemcpy(one.send, sent_bytes, host.data(), sent_bytes, ACL_MEMCPY_HOST_TO_DEVICE));
    CHECK(aclrtMemset(one.receive, received_bytes, 0xff, received_bytes));
    aclrtEvent start, end;
    CHECK(aclrtCreateEvent(&start));
    CHECK(aclrtCreateEvent(&end));
    for (int turn = 0; turn < kWarmUp; turn++) {
        CHECK(operation.call(one, count));
    }
    CHECK(aclrtRecordEvent(start, one.stream));
    for (int turn = 0; turn < kTimed; turn++) {
        CHECK(operation.call(one, count));
    }
    CHECK(aclrtRecordEvent(end, one.stream));
    CHECK(aclrtSynchronizeStream(one.stream));
    float milliseconds = -1;
    CHECK(aclrtEventElapsedTime(&milliseconds, start, end));
    CHECK(aclrtMemcpy(got.data(), received_bytes, one.receive, received_bytes, ACL_MEMCPY_DEVICE_TO_HOST));
    uint64_t wrong = 0;
    for (uint64_t at = 0; at < received; at++) {
        wrong += got[at] == operation.expected(one, count, at) ? 0 : 1;
    }
    CHECK(aclrtDestroyEvent(start));
    CHECK(aclrtDestroyEvent(end));
    if (one.rank == 0) {
        std::fprintf(stderr, "%s %llu bytes: %.3f ms\n", operation.name, static_cast<unsigned long long>(bytes),
                     milliseconds / kTimed);
    }
    if (wrong != 0 || !(milliseconds >= 0)) {
        std::fprintf(stderr, "rank %u, %s of %llu bytes: %llu wrong, %g ms\n", one.rank, operation.name,
                     static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(wrong),
                     static_cast<double>(milliseconds));
        std::exit(1);
    }
}

void as_rank(uint32_t rank, uint32_t ranks, const HcclRootInfo &info) {
    Rank one{rank, ranks, nullptr, nullptr, nullptr, nullptr};
    CHECK(aclrtSetDevice(static_cast<int32_t>(rank)));
    CHECK(aclrtCreateStream(&one.stream));
    CHECK(aclrtMalloc(&one.send, kLargest * ranks, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK(aclrtMalloc(&one.receive, kLargest * ranks, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK(HcclCommInitRootInfo(ranks, &info, rank, &one.comm));
    for (const Operation &operation : operations()) {
        for (uint64_t bytes = 8; bytes <= kLargest; bytes *= 8) {
            measure(one, operation, bytes);
        }
        if (rank == 0) {
            std::printf("%s %u ranks\n", operation.name, ranks);
        }
    }
    CHECK(HcclCommDestroy(one.comm));
    CHECK(aclrtFree(one.send));
    CHECK(aclrtFree(one.receive));
    CHECK(aclrtDestroyStream(one.stream));
    CHECK(aclrtResetDevice(static_cast<int32_t>(rank)));
}

void in_threads(uint32_t ranks) {
    HcclRootInfo info;
    CHECK(aclInit(nullptr));
    CHECK(aclrtSetDevice(0));
    CHECK(HcclGetRootInfo(&info));
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        threads.emplace_back([=, &info] { as_rank(rank, ranks, info); });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    CHECK(aclrtResetDevice(0));
    CHECK(aclFinalize());
}

// Rank 0 carries the root information to the others over pipes.
int in_processes(uint32_t ranks) {
    std::vector<int> readers, writers;
    std::vector<pid_t> children;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        int ends[2];
        CHECK(pipe(ends));
        readers.push_back(ends[0]);
        writers.push_back(ends[1]);
    }
    for (uint32_t rank = 0; rank < ranks; rank++) {
        const pid_t child = fork();
        if (child != 0) {
            children.push_back(child);
            continue;
        }
        HcclRootInfo info;
        CHECK(aclInit(nullptr));
        CHECK(aclrtSetDevice(static_cast<int32_t>(rank)));
        if (rank == 0) {
            CHECK(HcclGetRootInfo(&info));
            for (uint32_t other = 1; other < ranks; other++) {
                CHECK(write(writers[other], &info, sizeof(info)) != static_cast<ssize_t>(sizeof(info)));
            }
        } else {
            size_t got = 0;
            while (got < sizeof(info)) {
                const ssize_t some = read(readers[rank], reinterpret_cast<char *>(&info) + got, sizeof(info) - got);
                CHECK(some <= 0);
                got += static_cast<size_t>(some);
            }
        }
        as_rank(rank, ranks, info);
        CHECK(aclFinalize());
        // What the others wait for arrives before the end.
        std::exit(0);
    }
    int failed = 0;
    for (const pid_t child : children) {
        int status = 0;
        failed |= waitpid(child, &status, 0) != child || status != 0;
    }
    return failed;
}

}  // namespace

int main(int count, char **arguments) {
    if (count != 3) {
        return 2;
    }
    const auto ranks = static_cast<uint32_t>(std::atoi(arguments[2]));
    if (std::strcmp(arguments[1], "threads") == 0) {
        in_threads(ranks);
    } else if (in_processes(ranks) != 0) {
        return 1;
    }
    std::printf("done\n");
    return 0;
}
