// NVIDIA's library of exchanges without a GPU: ranks of one machine meet in shared memory, and numbers are right.
//
// An exchange is done at once, while its caller waits, as everything that the stand-in computes is. Sending from
// one rank to another, and exchanges within a graph that is being recorded, are refused. conftest.py makes the
// rest, which answers 0.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PART (1 << 20) // bytes that a rank lays out at once
#define SYSTEM_ERROR 2
#define INVALID_USAGE 5
#define REMOTE_ERROR 6

enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8, OTHER_FLOAT8 };
enum { SUM, PRODUCT, MOST, LEAST, MEAN };

typedef struct {
    char path[128];
} identity;

#define MOST_RANKS 64

struct shared {
    int arrived, turn; // of the barrier
    volatile int left; // has a rank left for good?
    volatile pid_t processes[MOST_RANKS];
    char parts[];
};

struct comm {
    int rank, num;
    volatile int aborted;
    size_t bytes;
    struct shared *shared;
};

static char *part(struct comm *comm, int rank) { return comm->shared->parts + (size_t)rank * PART; }

static int is_alone(struct comm *comm) {
    for (int rank = 0; rank < comm->num; rank++)
        if (comm->shared->processes[rank] && kill(comm->shared->processes[rank], 0))
            return 1;
    return comm->shared->left;
}

// All ranks come here before any goes on; not 0 where this one is told to give up, or another one is gone.
static int meet(struct comm *comm) {
    struct shared *shared = comm->shared;
    int turn = __atomic_load_n(&shared->turn, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&shared->arrived, 1, __ATOMIC_ACQ_REL) == comm->num) {
        __atomic_store_n(&shared->arrived, 0, __ATOMIC_RELEASE);
        __atomic_add_fetch(&shared->turn, 1, __ATOMIC_ACQ_REL);
        return 0;
    }
    for (int tries = 0; __atomic_load_n(&shared->turn, __ATOMIC_ACQUIRE) == turn; tries++) {
        if (comm->aborted || (tries % 100 == 99 && is_alone(comm)))
            return REMOTE_ERROR;
        tries < 1000 ? sched_yield() : usleep(100);
    }
    return 0;
}

int ncclGetVersion(int *version) { return *version = 23007, 0; }
const char *ncclGetErrorString(int error) {
    return error == SYSTEM_ERROR ? "unhandled system error (run with NCCL_DEBUG=INFO for details)"
                                 : "an error of the stand-in";
}
const char *ncclGetLastError(void *comm) { return ""; }

int ncclGetUniqueId(identity *made) {
    static int number;
    memset(made, 0, sizeof *made);
    snprintf(made->path, sizeof made->path, "/dev/shm/stand_in_nccl_%d_%d", getpid(), number++);
    return 0;
}

int ncclCommInitRankConfig(struct comm **made, int num, identity where, int rank, void *config) {
    struct comm *comm = calloc(1, sizeof *comm);
    if (getenv("STAND_IN_NCCL_ERROR"))
        return SYSTEM_ERROR;
    *comm = (struct comm){rank, num, 0, sizeof(struct shared) + (size_t)num * PART, 0};
    int file = num > MOST_RANKS ? -1 : open(where.path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, comm->bytes))
        return SYSTEM_ERROR;
    comm->shared = mmap(0, comm->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (comm->shared == MAP_FAILED)
        return SYSTEM_ERROR;
    comm->shared->processes[rank] = getpid();
    *made = comm;
    int failed = meet(comm);
    if (!failed && !rank)
        unlink(where.path);
    return failed;
}

int ncclCommInitRank(struct comm **made, int num, identity where, int rank) {
    return ncclCommInitRankConfig(made, num, where, rank, 0);
}

int ncclCommAbort(struct comm *comm) { return comm->shared->left = comm->aborted = 1, 0; } // a thread may wait in it
int ncclCommDestroy(struct comm *comm) {
    comm->shared->left = 1;
    return munmap(comm->shared, comm->bytes), free(comm), 0;
}
int ncclCommCount(struct comm *comm, int *count) { return *count = comm->num, 0; }
int ncclCommUserRank(struct comm *comm, int *rank) { return *rank = comm->rank, 0; }
int ncclCommGetAsyncError(struct comm *comm, int *error) { return *error = 0, 0; }

static size_t bytes_of(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

static float from_bfloat16(uint16_t bits) {
    uint32_t whole = (uint32_t)bits << 16;
    float value;
    return memcpy(&value, &whole, 4), value;
}

static uint16_t to_bfloat16(float value) { // to nearest, ties to even
    uint32_t whole;
    memcpy(&whole, &value, 4);
    return (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
}

#define COMBINED(a, b) \
    (op == PRODUCT ? (a) * (b) : op == MOST ? ((b) > (a) ? (b) : (a)) : op == LEAST ? ((b) < (a) ? (b) : (a)) : (a) + (b))
#define COMBINE(type) \
    for (size_t i = 0; i < count; i++) { \
        type value = ((type *)part(comm, 0))[i]; \
        for (int rank = 1; rank < comm->num; rank++) \
            value = COMBINED(value, ((type *)part(comm, rank))[i]); \
        ((type *)into)[i] = op == MEAN ? value / comm->num : value; \
    }

// What the parts of all ranks make together, in their order.
static int combine(struct comm *comm, void *into, size_t count, int type, int op) {
    switch (type) {
    case INT8: COMBINE(int8_t) break;
    case UINT8: COMBINE(uint8_t) break;
    case INT32: COMBINE(int32_t) break;
    case UINT32: COMBINE(uint32_t) break;
    case INT64: COMBINE(int64_t) break;
    case UINT64: COMBINE(uint64_t) break;
    case FLOAT16: COMBINE(_Float16) break;
    case FLOAT32: COMBINE(float) break;
    case FLOAT64: COMBINE(double) break;
    case BFLOAT16:
        for (size_t i = 0; i < count; i++) {
            float value = from_bfloat16(((uint16_t *)part(comm, 0))[i]);
            for (int rank = 1; rank < comm->num; rank++)
                value = COMBINED(value, from_bfloat16(((uint16_t *)part(comm, rank))[i]));
            ((uint16_t *)into)[i] = to_bfloat16(op == MEAN ? value / comm->num : value);
        }
        break;
    default: return INVALID_USAGE;
    }
    return 0;
}

static int may_run(struct comm *comm, cudaStream_t stream) {
    enum cudaStreamCaptureStatus status;
    cudaStreamIsCapturing(stream, &status);
    return !comm->aborted && status == cudaStreamCaptureStatusNone;
}

// Part by part: each rank in `from` (-1: all) lays out what it gives, and each in `to` takes what all make of
// it together, or with `op` -1 the part of each giver, `apart` bytes from each other.
static int exchange(struct comm *comm, const void *give, void *take, size_t count, int type, int op, int from, int to,
                    size_t apart, cudaStream_t stream) {
    size_t size = bytes_of(type), most = PART / size;
    if (!may_run(comm, stream))
        return INVALID_USAGE;
    for (size_t begun = 0; begun < count; begun += most) {
        size_t now = count - begun < most ? count - begun : most;
        if (from < 0 || from == comm->rank)
            memcpy(part(comm, comm->rank), (const char *)give + begun * size, now * size);
        int failed = meet(comm);
        if (!failed && (to < 0 || to == comm->rank)) {
            char *into = (char *)take + begun * size;
            if (op >= 0)
                failed = combine(comm, into, now, type, op);
            for (int rank = 0; op < 0 && rank < comm->num; rank++)
                if (from < 0 || from == rank)
                    memcpy(into + (from < 0 ? rank * apart : 0), part(comm, rank), now * size);
        }
        failed = failed ? failed : meet(comm);
        if (failed)
            return failed;
    }
    return 0;
}

int ncclAllReduce(const void *give, void *take, size_t count, int type, int op, struct comm *comm, cudaStream_t stream) {
    return exchange(comm, give, take, count, type, op, -1, -1, 0, stream);
}

int ncclReduce(const void *give, void *take, size_t count, int type, int op, int root, struct comm *comm,
               cudaStream_t stream) {
    return exchange(comm, give, take, count, type, op, -1, root, 0, stream);
}

int ncclBroadcast(const void *give, void *take, size_t count, int type, int root, struct comm *comm,
                  cudaStream_t stream) {
    return exchange(comm, give, take, count, type, -1, root, -1, 0, stream);
}

int ncclBcast(void *buffer, size_t count, int type, int root, struct comm *comm, cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

int ncclAllGather(const void *give, void *take, size_t count, int type, struct comm *comm, cudaStream_t stream) {
    return exchange(comm, give, take, count, type, -1, -1, -1, count * bytes_of(type), stream);
}

int ncclReduceScatter(const void *give, void *take, size_t count, int type, int op, struct comm *comm,
                      cudaStream_t stream) {
    int failed = 0;
    for (int rank = 0; rank < comm->num && !failed; rank++)
        failed = exchange(comm, (const char *)give + rank * count * bytes_of(type), take, count, type, op, -1, rank, 0,
                          stream);
    return failed;
}

int ncclSend(const void *give, size_t count, int type, int peer, struct comm *comm, cudaStream_t stream) {
    return INVALID_USAGE;
}
int ncclRecv(void *take, size_t count, int type, int peer, struct comm *comm, cudaStream_t stream) {
    return INVALID_USAGE;
}
int ncclAlltoAll(const void *give, void *take, size_t count, int type, struct comm *comm, cudaStream_t stream) {
    return INVALID_USAGE;
}
int ncclCommSplit(struct comm *comm, int color, int key, struct comm **made, void *config) { return INVALID_USAGE; }
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int where, struct comm *comm) { return INVALID_USAGE; }
