/* Runs the kernels of src/vivace/mechanisms/nhwc_norm.c on few channels and rows, for sanitizers to watch, and compares
   means with plain sums. Every array is as long as it must be, and no longer; where `guarded`, it ends before a page that
   nobody may touch, as sanitizers do not see instructions with masks. */
#include "nhwc_norm.c"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

static int guarded;

static int64_t in_pages(int64_t bytes) {
    int64_t page = sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

static void *room(int64_t bytes) {
    if (!guarded) {
        void *found = malloc(bytes);
        if (!found) exit(2);
        return found;
    }
    int64_t whole = in_pages(bytes), page = in_pages(1);
    char *found = mmap(0, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED || mprotect(found + whole, page, PROT_NONE)) exit(2);
    return found + whole - bytes;
}

static void leave(void *found, int64_t bytes) {
    if (!guarded) free(found);
    else munmap((char *)found + bytes - in_pages(bytes), in_pages(bytes) + in_pages(1));
}

static int apart(double mine, double theirs) { return !(fabs(mine - theirs) < 1e-5); }

static int tried(int64_t c) {
    for (int64_t half = 0; half < 2; half++)
        for (int64_t rows = 2; rows < 700; rows = 2 * rows + 1) {
            int64_t bytes = rows * c * (half ? 2 : 4);
            void *x = room(bytes), *gradient = room(bytes), *result = room(bytes), *for_x = room(bytes);
            float *by_channel[8];
            for (int i = 0; i < 8; i++) by_channel[i] = room(4 * c);
            for (int64_t i = 0; i < rows * c; i++) {
                float number = (i * 7919 % 1000) / 500.0f - 1.0f;
                if (half) ((uint16_t *)x)[i] = narrow(number), ((uint16_t *)gradient)[i] = narrow(number * number);
                else ((float *)x)[i] = number, ((float *)gradient)[i] = number * number;
            }
            float *weight = by_channel[0], *bias = by_channel[1], *moved = by_channel[2], *spread = by_channel[3];
            float *mean = by_channel[4], *rstd = by_channel[5], *sums = by_channel[6], *more = by_channel[7];
            for (int64_t k = 0; k < c; k++) weight[k] = 0.5f, bias[k] = 1.0f, moved[k] = 0.0f, spread[k] = 1.0f;
            Shape s = {rows, c, half, 2};
            if (forward(x, weight, bias, moved, spread, 1.0, 1e-5, result, mean, rstd, &s)) return 2;
            if (backward(gradient, x, weight, mean, rstd, for_x, sums, more, &s)) return 2;
            for (int64_t k = 0; k < c; k++) {
                double sum = 0.0;
                for (int64_t row = 0; row < rows; row++)
                    sum += half ? wide(((uint16_t *)x)[row * c + k]) : ((float *)x)[row * c + k];
                if (apart(mean[k], sum / rows) || apart(moved[k], mean[k])) return 3;
            }
            if (forward(x, 0, 0, 0, 0, 0.1, 1e-5, result, mean, rstd, &s)) return 2;
            if (backward(gradient, x, 0, mean, rstd, 0, sums, more, &s)) return 2;
            for (int i = 0; i < 8; i++) leave(by_channel[i], 4 * c);
            leave(x, bytes), leave(gradient, bytes), leave(result, bytes), leave(for_x, bytes);
        }
    return 0;
}

int main(void) {
    int failed = 0;
    for (guarded = 0; guarded < 2 && !failed; guarded++) {
        for (int64_t c = 1; c < 36 && !failed; c++) failed = tried(c);
        for (int64_t c = 64; c < 72 && !failed; c += 6) failed = tried(c); /* vectors enough to be summed row by row */
    }
    return failed;
}
