// CUDA's runtime library without a GPU, for torch's own C++: its allocator, streams, events and graph capture.
//
// Memory is mapped and copies are made, so what is copied to the device can be read back. Kernels do nothing:
// speeds mean nothing, and numbers only with computing/stand_in_kernels.py. Every other function that torch wants is made by conftest.py and answers 0.
// The variables STAND_IN_* say which machine to be; conftest.py lists them.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>

#define MOST_STREAMS 1024

static long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value ? atol(value) : otherwise;
}

// Errors: as in CUDA, the last one stays until somebody asks for it.

static __thread cudaError_t last_error;

static cudaError_t failed(cudaError_t error) { return last_error = error; }

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorDevicesUnavailable: return "CUDA-capable device(s) is/are busy or unavailable";
    case cudaErrorSystemNotReady: return "system not yet initialized";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    default: return "an error of the stand-in";
    }
}

const char *cudaGetErrorName(cudaError_t error) { return "cudaErrorOfTheStandIn"; }

// Devices

static __thread int current_device;

static int is_slice(void) { return getenv("STAND_IN_MIG") != 0; } // of a GPU in MIG mode, as nvml.c tells

static size_t total_bytes(void) { return ((size_t)setting("STAND_IN_GIB", 80) << 30) / (is_slice() ? 8 : 1); }

// Exclusive mode: the first process that allocates keeps the device until it ends.
static int is_taken(void) {
    static int taken = -1;
    const char *lock = getenv("STAND_IN_EXCLUSIVE");
    if (taken < 0 || !lock) {
        int file = lock ? open(lock, O_CREAT | O_RDWR | O_CLOEXEC, 0666) : -1;
        taken = lock && flock(file, LOCK_EX | LOCK_NB);
    }
    return taken;
}

cudaError_t cudaGetDeviceCount(int *count) {
    const char *shown = getenv("CUDA_VISIBLE_DEVICES");
    long all = is_slice() ? setting("STAND_IN_MIG", 0) > 0 : setting("STAND_IN_GPUS", 1);
    *count = shown ? 0 : all;
    if (is_slice() && shown && !strncmp(shown, "MIG-", 4))
        shown = 0, *count = all; // a process is shown one instance
    for (char *end; shown && *shown; shown = *end ? end + 1 : end, ++*count) {
        long number = strtol(shown, &end, 10);
        if (end == shown || number < 0 || number >= all)
            break; // CUDA stops at the first that is none
    }
    return failed(setting("STAND_IN_START_ERROR", *count ? cudaSuccess : cudaErrorNoDevice));
}

cudaError_t cudaGetDevice(int *device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return current_device = device, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) { // an H100's
    memset(found, 0, sizeof *found);
    strcpy(found->name, is_slice() ? "NVIDIA H100 80GB HBM3 MIG 1g.10gb" : "NVIDIA H100 80GB HBM3");
    found->major = setting("STAND_IN_CAPABILITY", 90) / 10;
    found->minor = setting("STAND_IN_CAPABILITY", 90) % 10;
    found->totalGlobalMem = total_bytes();
    found->multiProcessorCount = 132;
    found->warpSize = 32;
    found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 2147483647;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->maxThreadsPerMultiProcessor = 2048;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->sharedMemPerBlock = 49152;
    found->sharedMemPerBlockOptin = 232448;
    found->sharedMemPerMultiprocessor = 233472;
    found->l2CacheSize = 50 << 20;
    found->memoryBusWidth = 5120;
    found->asyncEngineCount = 3;
    found->unifiedAddressing = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    struct cudaDeviceProp found;
    cudaGetDeviceProperties(&found, device);
    switch ((int)which) {
    case cudaDevAttrComputeCapabilityMajor: *value = found.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = found.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = found.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = found.maxThreadsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = found.maxGridSize[0]; break; // a scan is cut into as much; by 0 it never ends
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = found.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = found.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = found.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = found.regsPerBlock; break;
    case cudaDevAttrWarpSize: *value = found.warpSize; break;
    case cudaDevAttrL2CacheSize: *value = found.l2CacheSize; break;
    case 102: *value = 1; break; // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    return snprintf(text, size, "0000:%02x:00.0", device + 1), cudaSuccess;
}

// Memory: a list of what is mapped. The device's counts towards its size.

struct block {
    char *begin;
    size_t bytes;
    enum cudaMemoryType type;
    struct block *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks;
static size_t used_bytes;

static cudaError_t allocate(void **place, size_t bytes, enum cudaMemoryType type) {
    bytes = (bytes + 8191) / 4096 * 4096;
    if (type == cudaMemoryTypeDevice && used_bytes + bytes > total_bytes())
        return failed(cudaErrorMemoryAllocation);
    static char *after = (char *)0x200000000000; // one after the other, by which torch before 2.15 chooses among equals
    *place = mmap(__atomic_fetch_add(&after, bytes, __ATOMIC_RELAXED), bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*place == MAP_FAILED)
        return failed(cudaErrorMemoryAllocation);
    struct block *made = malloc(sizeof *made);
    pthread_mutex_lock(&lock);
    *made = (struct block){*place, bytes, type, blocks};
    blocks = made;
    used_bytes += type == cudaMemoryTypeDevice ? bytes : 0;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static cudaError_t release(void *place) {
    pthread_mutex_lock(&lock);
    for (struct block **at = &blocks; *at; at = &(*at)->next) {
        struct block *found = *at;
        if (found->begin != place)
            continue;
        *at = found->next;
        used_bytes -= found->type == cudaMemoryTypeDevice ? found->bytes : 0;
        munmap(found->begin, found->bytes);
        free(found);
        break;
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static enum cudaMemoryType type_of(const char *place) {
    enum cudaMemoryType type = cudaMemoryTypeUnregistered;
    pthread_mutex_lock(&lock);
    for (struct block *one = blocks; one; one = one->next)
        if (place >= one->begin && place < one->begin + one->bytes)
            type = one->type;
    pthread_mutex_unlock(&lock);
    return type;
}

// So many allocations of a process succeed; then so many fail, or all.
static int is_full(const char *name, long *allocations) {
    long full = setting(name, -1), number = full < 0 ? 0 : __atomic_add_fetch(allocations, 1, __ATOMIC_RELAXED);
    return full >= 0 && number > full && number - full <= setting("STAND_IN_FULL_FOR", number);
}

cudaError_t cudaMalloc(void **place, size_t bytes) {
    static long allocations;
    if (!bytes)
        return *place = 0, cudaSuccess;
    if (is_full("STAND_IN_FULL_AFTER", &allocations))
        return failed(cudaErrorMemoryAllocation);
    return is_taken() ? failed(cudaErrorDevicesUnavailable) : allocate(place, bytes, cudaMemoryTypeDevice);
}

cudaError_t cudaHostAlloc(void **place, size_t bytes, unsigned flags) {
    static long allocations;
    if (is_full("STAND_IN_HOST_FULL_AFTER", &allocations))
        return failed(cudaErrorMemoryAllocation);
    return allocate(place, bytes, cudaMemoryTypeHost);
}

cudaError_t cudaFree(void *place) { return release(place); }
cudaError_t cudaFreeHost(void *place) { return release(place); }

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *total = total_bytes();
    *free = *total - used_bytes;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *place) {
    memset(found, 0, sizeof *found);
    found->type = type_of(place);
    found->devicePointer = found->hostPointer = (void *)place;
    return cudaSuccess;
}

// Streams, events and capture. A stream is the default one (null, 1 or 2) or one of ours.

struct stream {
    int priority;
    unsigned long long capture; // the number of the capture that it takes part in; 0: of none
};

struct event {
    int recorded;
    unsigned long long capture;
    double milliseconds; // of the host's clock
};

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec * 1e-6;
}

static struct stream default_stream, *streams[MOST_STREAMS];
static int num_streams, num_captures;
static long num_nodes; // kernels of the capture under way, or of the last one
static unsigned long long captures_made;

static struct stream *stream_of(cudaStream_t stream) {
    return (size_t)stream > 2 ? (struct stream *)stream : &default_stream;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    struct stream *made = calloc(1, sizeof *made);
    made->priority = priority;
    if (num_streams == MOST_STREAMS)
        return failed(cudaErrorMemoryAllocation);
    streams[num_streams++] = made;
    *stream = (cudaStream_t)made;
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    return *priority = stream_of(stream)->priority, cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return stream_of(stream)->capture ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaStreamQuery(stream); }

cudaError_t cudaDeviceSynchronize(void) {
    return num_captures ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    return *event = calloc(1, sizeof(struct event)), cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    *(struct event *)event = (struct event){1, stream_of(stream)->capture, now()};
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    return ((struct event *)event)->capture ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaEventQuery(event); }

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    double elapsed = ((struct event *)end)->milliseconds - ((struct event *)begin)->milliseconds;
    return *milliseconds = elapsed, cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    struct event *awaited = (struct event *)event;
    struct stream *waiting = stream_of(stream);
    if (awaited->capture && !waiting->capture) { // who waits for a captured event joins the capture
        if (waiting == &default_stream)
            return failed(cudaErrorStreamCaptureImplicit);
        waiting->capture = awaited->capture;
    } else if (!awaited->capture && awaited->recorded && waiting->capture) {
        return failed(cudaErrorStreamCaptureIsolation);
    }
    return cudaSuccess;
}

// A graph is the number of its capture; what it is made of lies with who computes, if anybody does.
static void (*replays)(unsigned long long), (*forgets)(unsigned long long);

void stand_in_replays(void (*replay)(unsigned long long), void (*forget)(unsigned long long)) {
    replays = replay, forgets = forget;
}

// A kernel that is computed elsewhere: counted; the number of the capture under way.
unsigned long long stand_in_note(cudaStream_t stream) { return num_nodes++, stream_of(stream)->capture; }

static void *numbered(unsigned long long capture) {
    unsigned long long *made = malloc(sizeof *made);
    return *made = capture, made;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    if (stream_of(stream) == &default_stream)
        return failed(cudaErrorStreamCaptureInvalidated);
    stream_of(stream)->capture = ++captures_made;
    num_captures++;
    num_nodes = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    unsigned long long ended = stream_of(stream)->capture;
    for (int i = 0; i < num_streams; i++)
        if (streams[i]->capture == ended)
            streams[i]->capture = 0;
    num_captures--;
    *graph = numbered(ended);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = stream_of(stream)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    cudaStreamIsCapturing(stream, status);
    if (id)
        *id = stream_of(stream)->capture;
    if (graph)
        *graph = (cudaGraph_t)8;
    if (nodes)
        *nodes = 0;
    if (edges)
        *edges = 0;
    if (count)
        *count = 0;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    return *made = numbered(*(unsigned long long *)graph), cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(made, graph, flags);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return free(graph), cudaSuccess; }

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    if (replays)
        replays(*(unsigned long long *)graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    if (forgets)
        forgets(*(unsigned long long *)graph);
    return free(graph), cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    return *count = num_nodes, cudaSuccess;
}

// Copies and kernels

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    const void *host = kind == cudaMemcpyDeviceToHost ? to : kind == cudaMemcpyHostToDevice ? from : 0;
    if (host && stream_of(stream)->capture && type_of(host) == cudaMemoryTypeUnregistered)
        return failed(cudaErrorStreamCaptureUnsupported); // pageable memory: the copy would wait
    return memcpy(to, from, bytes), cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return memcpy(to, from, bytes), cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *place, int value, size_t bytes, cudaStream_t stream) {
    return memset(place, value, bytes), cudaSuccess;
}

cudaError_t cudaMemset(void *place, int value, size_t bytes) { return memset(place, value, bytes), cudaSuccess; }

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    num_nodes += stream_of(stream)->capture != 0;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

// What nvcc puts around `kernel<<<grid, block, shared, stream>>>()`.
static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(void **)stream = pushed.stream;
    return cudaSuccess;
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[1];
    return handle;
}

cudaError_t __cudaGetKernel(void **found, const void *kernel) { return *found = (void *)kernel, cudaSuccess; }

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    found->binaryVersion = found->ptxVersion = 90;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *kernel, int threads, size_t shared) {
    return *count = 2, cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *kernel, int threads,
                                                                   size_t shared, unsigned flags) {
    return *count = 2, cudaSuccess;
}

// What torch asks the driver for by name

static int done(void) { return 0; }
static int reserve(void **place, size_t bytes, size_t alignment, void *wish, unsigned long long flags) {
    static char *after = (char *)0x200000000000; // one after the other, by which torch before 2.15 chooses among equals
    *place = mmap(__atomic_fetch_add(&after, bytes, __ATOMIC_RELAXED), bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *place == MAP_FAILED ? cudaErrorMemoryAllocation : 0;
}
static int create(unsigned long long *handle, size_t bytes, const void *properties, unsigned long long flags) {
    static unsigned long long made;
    return *handle = ++made, 0;
}
static int primary_context(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
static int context(void **found) { return *found = (void *)8, 0; }
static int attribute(int *value, int which, int device) { return cudaDeviceGetAttribute(value, which, device); }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    static const struct {
        const char *name;
        void *function;
    } known[] = {{"cuMemAddressReserve", reserve},
                 {"cuMemCreate", create},
                 {"cuDevicePrimaryCtxGetState", primary_context},
                 {"cuCtxGetCurrent", context},
                 {"cuDeviceGetAttribute", attribute}};
    *found = done;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name))
            *found = known[i].function;
    if (status)
        *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// cuBLAS: handles that are not null, and an algorithm for every product

int cublasCreate_v2(void **made) { return *made = calloc(1, 64), 0; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0, 0; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { return *made = calloc(1, 64), 0; }
int cublasLtMatmulPreferenceCreate(void **made) { return *made = calloc(1, 64), 0; }
int cublasLtMatrixLayoutCreate(void **made, int type, unsigned long long rows, unsigned long long columns,
                               long long step) {
    return *made = calloc(1, 64), 0;
}
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *wish,
                                   int wanted, char *results, int *found) {
    return memset(results, 0, 80), *found = 1, 0;
}
size_t cublasLtGetVersion(void) { return 130400; }

// CUPTI: conftest.py lets the rest answer "not initialized", as where another profiler is attached

int cuptiGetResultString(int result, const char **text) { return *text = "CUPTI_ERROR_NOT_INITIALIZED", 0; }
