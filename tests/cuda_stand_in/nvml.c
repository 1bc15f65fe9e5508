// NVIDIA's management library without a GPU: the H100s of runtime.c, as `pynvml` asks for them.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_GPUS 16
#define MOST_SLICES 7
#define NOT_SUPPORTED 3
#define NOT_FOUND 6

// A handle is a place in one of these; a slice is an instance of a GPU in MIG mode, with an eighth of its memory.
static char gpus[MOST_GPUS], slices[MOST_GPUS * MOST_SLICES];

static long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value ? atol(value) : otherwise;
}

static int slice_of(void *handle) { // or -1, of a whole GPU
    char *place = handle;
    return place >= slices && place < slices + sizeof slices ? place - slices : -1;
}

int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return error == NOT_SUPPORTED ? "Not Supported" : "an error of the stand-in"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { return strncpy(text, "580.159.04", size), 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = setting("STAND_IN_CUDA", 13020), 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = setting("STAND_IN_GPUS", 1), 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) { return *gpu = &gpus[index], 0; }
static int is_slower(void *gpu) { // where one GPU is the fastest of several
    return getenv("STAND_IN_FASTEST") && gpu != &gpus[setting("STAND_IN_FASTEST", 0)];
}

int nvmlDeviceGetName(void *gpu, char *text, unsigned size) {
    if (is_slower(gpu))
        return snprintf(text, size, "NVIDIA L4"), 0;
    return snprintf(text, size, "NVIDIA H100 80GB HBM3%s", slice_of(gpu) < 0 ? "" : " MIG 1g.10gb"), 0;
}
int nvmlDeviceGetComputeMode(void *gpu, int *mode) {
    if (getenv("STAND_IN_HIDES_MODE"))
        return NOT_SUPPORTED;
    return *mode = getenv("STAND_IN_EXCLUSIVE") ? 3 : 0, 0;
}
int nvmlDeviceGetMigMode(void *gpu, unsigned *current, unsigned *pending) {
    return getenv("STAND_IN_MIG") ? *current = *pending = 1, 0 : NOT_SUPPORTED;
}
int nvmlDeviceGetMaxMigDeviceCount(void *gpu, unsigned *count) { return *count = MOST_SLICES, 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *gpu, unsigned index, void **slice) {
    if (index >= setting("STAND_IN_MIG", 0))
        return NOT_FOUND;
    return *slice = &slices[((char *)gpu - gpus) * MOST_SLICES + index], 0;
}
int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, unsigned *active) { return NOT_SUPPORTED; }

// Asked for by torch's allocator, where segments grow
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **gpu) { return *gpu = gpus, 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *gpu, unsigned link, int *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *gpu, unsigned link, void *info) { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses(void *gpu, unsigned *count, void *found) { return *count = 0, 0; }

int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) {
    long capability = setting("STAND_IN_CAPABILITY", 90);
    return *major = capability / 10, *minor = capability % 10, 0;
}

int nvmlDeviceGetUUID(void *gpu, char *text, unsigned size) {
    int slice = slice_of(gpu), number = slice < 0 ? (int)((char *)gpu - gpus) : slice;
    return snprintf(text, size, "%s-00000000-0000-0000-0000-%012d", slice < 0 ? "GPU" : "MIG", number), 0;
}

int nvmlDeviceGetMemoryInfo(void *gpu, unsigned long long *total_free_used) {
    total_free_used[0] = ((unsigned long long)setting("STAND_IN_GIB", 80) << 30) / (slice_of(gpu) < 0 ? 1 : 8);
    total_free_used[2] = 1ull << 30;
    total_free_used[1] = total_free_used[0] - total_free_used[2];
    return 0;
}
