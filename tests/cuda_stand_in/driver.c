// CUDA's driver without a GPU, as far as Triton asks for it. conftest.py makes the rest, which answers 0.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static int setting(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

int cuDriverGetVersion(int *version) { return *version = 13020, 0; }
int cuDeviceGetCount(int *count) { return *count = setting("STAND_IN_GPUS", 1), 0; }
int cuDeviceGet(int *device, int number) { return *device = number, 0; }
int cuDeviceGetUuid_v2(char uuid[16], int device) { // nvml.c's number: the fastest is CUDA's first
    int fastest = setting("STAND_IN_FASTEST", 0);
    memset(uuid, 0, 16);
    uuid[15] = device == 0 ? fastest : device <= fastest ? device - 1 : device;
    return 0;
}
int cuCtxGetCurrent(void **context) { return *context = (void *)8, 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
int cuModuleLoadData(void **module, const void *data) { return *module = (void *)8, 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { return *function = (void *)8, 0; }
int cuFuncGetAttribute(int *value, int which, void *function) { return *value = which ? 0 : 1024, 0; }
int cuGetErrorString(int error, const char **text) { return *text = "an error of the stand-in", 0; }

// A launch of Triton's computes nothing; a graph that is being recorded counts it.
static int launched(void *stream) {
    void (*note)(void *) = dlsym(RTLD_DEFAULT, "stand_in_note");
    if (note)
        note(stream);
    return 0;
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **given, void **more) {
    return launched(stream);
}

struct launch {
    unsigned grid_and_block[6], shared;
    void *stream;
};

int cuLaunchKernelEx(const struct launch *how, void *function, void **given, void **more) {
    return launched(how->stream);
}

int cuDeviceGetAttribute(int *value, int which, int device) { // the runtime knows
    int (*ask)(int *, int, int) = dlsym(RTLD_DEFAULT, "cudaDeviceGetAttribute");
    return ask ? ask(value, which, device) : (*value = 0, 0);
}

int cuPointerGetAttribute(void *value, int which, unsigned long long place) {
    if (which == 3) // CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        *(unsigned long long *)value = place;
    return 0;
}
