/* What torch computes a number at a time on a CPU, by vector instructions or on all threads: the same bits. */
#include <math.h>
#include <stdlib.h>

#include "numbers.h"

static inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

/* `out` is one tensor where a mask holds, and another elsewhere; each is dense, or without memory and one number.
   `steps` are the mask's strides by axis of `sizes`, the last of them 0 or 1. */
#define CHOOSE(NAME, TYPE)                                                                                      \
    static void NAME(TYPE *out, const uint8_t *mask, const TYPE *a, TYPE of_a, const TYPE *b, TYPE of_b,        \
                     int64_t count, int64_t step) {                                                             \
        if (!step) {                                                                                            \
            const TYPE *from = *mask ? a : b;                                                                   \
            TYPE one = *mask ? of_a : of_b;                                                                     \
            if (!from)                                                                                          \
                for (int64_t n = 0; n < count; n++) out[n] = one;                                               \
            else if (from != out) memmove(out, from, count * sizeof(TYPE));                                     \
        } else if (a && b) {                                                                                    \
            for (int64_t n = 0; n < count; n++) out[n] = mask[n] ? a[n] : b[n];                                 \
        } else if (a) {                                                                                         \
            for (int64_t n = 0; n < count; n++) out[n] = mask[n] ? a[n] : of_b;                                 \
        } else if (b) {                                                                                         \
            for (int64_t n = 0; n < count; n++) out[n] = mask[n] ? of_a : b[n];                                 \
        } else {                                                                                                \
            for (int64_t n = 0; n < count; n++) out[n] = mask[n] ? of_a : of_b;                                 \
        }                                                                                                       \
    }
CHOOSE(choose2, uint16_t)
CHOOSE(choose4, uint32_t)
CHOOSE(choose8, uint64_t)

void choose(char *out, const uint8_t *mask, const char *a, const char *b, uint64_t of_a, uint64_t of_b,
            int64_t bytes, int64_t axes, const int64_t *sizes, const int64_t *steps, int64_t threads) {
    int64_t rows = 1, columns = sizes[axes - 1], step = steps[axes - 1];
    for (int64_t axis = 0; axis < axes - 1; axis++) rows *= sizes[axis];
    int64_t total = rows * columns;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t task = 0; task < threads; task++) {
        int64_t end = total * (task + 1) / threads;
        for (int64_t at = total * task / threads; at < end;) {
            int64_t row = at / columns, column = at % columns, count = least(columns - column, end - at);
            const uint8_t *here = mask + column * step;
            for (int64_t axis = axes - 2; axis >= 0; row /= sizes[axis--]) here += row % sizes[axis] * steps[axis];
            const void *one = a ? a + at * bytes : a, *other = b ? b + at * bytes : b;
            void *to = out + at * bytes;
            if (bytes == 2) choose2(to, here, one, of_a, other, of_b, count, step);
            else if (bytes == 4) choose4(to, here, one, of_a, other, of_b, count, step);
            else choose8(to, here, one, of_a, other, of_b, count, step);
            at += count;
        }
    }
}

typedef struct {
    int64_t planes, height, width, out_height, out_width;
    int64_t window[2], stride[2], padding[2], dilation[2];
    int64_t half, threads;
} Pool;

/* One place of the window, for all outputs of a row: the largest so far, and where in its plane it lies. */
#define TAKE(NAME, STRIDE)                                                                                     \
    static void NAME(float *restrict best, int32_t *restrict places, const float *restrict row, int64_t first, \
                     int64_t last, int64_t stride, int64_t offset, int32_t place) {                            \
        for (int64_t n = first; n < last; n++) {                                                               \
            float number = row[n * STRIDE + offset];                                                           \
            int taken = (number > best[n]) | (number != number);                                               \
            best[n] = taken ? number : best[n];                                                                \
            places[n] = taken ? place + (int32_t)(n * STRIDE + offset) : places[n];                            \
        }                                                                                                      \
    }
TAKE(take, stride)
TAKE(take_by_1, 1)
TAKE(take_by_2, 2)

/* The outputs of one row of a plane: `best` and `places`, by way of the `line` that rows of halves are widened to. */
static void pool_row(const char *plane, int64_t output, const Pool *p, float *best, int32_t *places, float *line) {
    int64_t across = p->stride[1], top = output * p->stride[0] - p->padding[0], begin = top;
    while (begin < 0) begin += p->dilation[0];
    for (int64_t n = 0; n < p->out_width; n++) {
        best[n] = -INFINITY;
        places[n] = (int32_t)(begin * p->width + n * across - p->padding[1]);
    }
    for (int64_t n = 0; n < p->out_width && n * across < p->padding[1]; n++)
        for (int64_t left = n * across - p->padding[1]; left < 0; left += p->dilation[1]) places[n] += p->dilation[1];
    for (int64_t i = 0; i < p->window[0]; i++) {
        int64_t high = top + i * p->dilation[0];
        if (high < 0 || high >= p->height) continue;
        const float *row = (const float *)plane + high * p->width;
        if (p->half) {
            const uint16_t *halves = (const uint16_t *)plane + high * p->width;
            for (int64_t n = 0; n < p->width; n++) line[n] = wide(halves[n]);
            row = line;
        }
        for (int64_t j = 0; j < p->window[1]; j++) {
            int64_t offset = j * p->dilation[1] - p->padding[1];
            int64_t first = offset < 0 ? (-offset + across - 1) / across : 0;
            int64_t last = offset >= p->width ? 0 : least((p->width - 1 - offset) / across + 1, p->out_width);
            (across == 1 ? take_by_1 : across == 2 ? take_by_2 : take)(best, places, row, first, last, across, offset,
                                                                       (int32_t)(high * p->width));
        }
    }
}

/* Largest numbers of windows, and their places. Returns 1 where there is no memory for a row. */
int pool(const char *in, char *out, int64_t *indices, const Pool *p) {
    int failed = 0;
#pragma omp parallel num_threads(p->threads)
    {
        float *best = malloc(p->out_width * sizeof *best), *line = malloc(p->width * sizeof *line);
        int32_t *places = malloc(p->out_width * sizeof *places);
        int ready = best && line && places;
        if (!ready) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static) collapse(2)
        for (int64_t plane = 0; plane < p->planes; plane++)
            for (int64_t output = 0; output < p->out_height; output++) {
                if (!ready) continue;
                int64_t to = (plane * p->out_height + output) * p->out_width;
                pool_row(in + plane * p->height * p->width * (p->half ? 2 : 4), output, p, best, places, line);
                for (int64_t n = 0; n < p->out_width; n++) indices[to + n] = places[n];
                if (p->half)
                    for (int64_t n = 0; n < p->out_width; n++) ((uint16_t *)out)[to + n] = narrow(best[n]);
                else memcpy((float *)out + to, best, p->out_width * sizeof *best);
            }
        free(best), free(line), free(places);
    }
    return failed;
}

/* Rows of `values` added to the rows of `sums` that `indices` name, in their order: each thread has rows of its own.
   Returns 1, with nothing done, where an index names none. */
int add_rows(char *sums, const int64_t *indices, const char *values, int64_t rows, int64_t count, int64_t columns,
             int64_t half, int64_t threads) {
    int outside = 0;
    for (int64_t n = 0; n < count; n++) outside |= indices[n] < -rows || indices[n] >= rows;
    if (outside) return 1;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t task = 0; task < threads; task++) {
        int64_t begin = rows * task / threads, end = rows * (task + 1) / threads;
        for (int64_t n = 0; n < count; n++) {
            int64_t row = indices[n] < 0 ? indices[n] + rows : indices[n];
            if (row < begin || row >= end) continue;
            if (!half) {
                float *to = (float *)sums + row * columns;
                const float *from = (const float *)values + n * columns;
                for (int64_t c = 0; c < columns; c++) to[c] += from[c];
            } else {
                uint16_t *to = (uint16_t *)sums + row * columns;
                const uint16_t *from = (const uint16_t *)values + n * columns;
                for (int64_t c = 0; c < columns; c++) to[c] = narrow(wide(to[c]) + wide(from[c]));
            }
        }
    }
    return 0;
}

/* Both gradients of `x > 0 ? x : weight * x`, of which the second is still to be summed. */
#define PRELU(NAME, WEIGHT)                                                                                      \
    static void NAME(const float *g, const float *x, const float *w, float *of_x, float *of_w, int64_t count) { \
        const float one = *w;                                                                                   \
        for (int64_t n = 0; n < count; n++) {                                                                   \
            float given = g[n], number = x[n], weight = WEIGHT;                                                 \
            of_x[n] = number > 0 ? given : weight * given;                                                      \
            of_w[n] = number > 0 ? 0 : number * given;                                                          \
        }                                                                                                       \
    }                                                                                                           \
    static void NAME##_half(const uint16_t *g, const uint16_t *x, const uint16_t *w, uint16_t *of_x,            \
                            uint16_t *of_w, int64_t count) {                                                    \
        const uint16_t one = *w;                                                                                \
        for (int64_t n = 0; n < count; n++) {                                                                   \
            float given = wide(g[n]), number = wide(x[n]), weight = wide(WEIGHT);                               \
            of_x[n] = number > 0 ? g[n] : narrow(weight * given);                                               \
            of_w[n] = number > 0 ? 0 : narrow(number * given);                                                  \
        }                                                                                                       \
    }
PRELU(prelu_of_one, one)
PRELU(prelu_of_each, w[n])

/* A weight a channel, in the middle of three axes; where the last has one place, rows are of all channels. */
void prelu_backward(const char *gradient, const char *x, const char *weight, char *of_x, char *of_weight,
                    int64_t outer, int64_t channels, int64_t inner, int64_t half, int64_t threads) {
    int each = inner == 1 && channels > 1;
    int64_t rows = each ? outer : outer * channels, columns = each ? channels : inner, bytes = half ? 2 : 4;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = row * columns * bytes;
        const void *w = weight + (each ? 0 : row % channels * bytes);
        if (half)
            (each ? prelu_of_each_half : prelu_of_one_half)((const void *)(gradient + at), (const void *)(x + at), w,
                                                            (void *)(of_x + at), (void *)(of_weight + at), columns);
        else
            (each ? prelu_of_each : prelu_of_one)((const void *)(gradient + at), (const void *)(x + at), w,
                                                  (void *)(of_x + at), (void *)(of_weight + at), columns);
    }
}
