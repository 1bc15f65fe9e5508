/* Gradients of depthwise convolutions of NHWC feature maps. A task takes LANES channels of a few images: rows are
   widened to float once, with the zeros around them, and every product of the inner loops is of whole vectors. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "numbers.h"

typedef struct {
    int64_t images, channels, height, width, out_height, out_width;
    int64_t window[2], stride[2], padding[2], dilation[2];
    int64_t half, threads;
} Shape;

/* Rows `first` to `first + rows` of one image's `count` channels, zeros where the image has none. */
static void widen_rows(Vector *to, const void *from, int64_t first, int64_t rows, int64_t height, int64_t width,
                       int64_t around, int64_t full, int64_t channels, int64_t channel, int64_t count, int half) {
    for (int64_t r = 0; r < rows; r++) {
        Vector *row = to + r * full;
        int64_t at = first + r;
        if (at < 0 || at >= height) {
            memset(row, 0, full * sizeof(Vector));
            continue;
        }
        memset(row, 0, around * sizeof(Vector));
        int64_t base = at * width * channels + channel;
        int64_t kept = width < full - around ? width : full - around;
        if (count == LANES)
            for (int64_t c = 0; c < kept; c++) row[around + c] = widened(from, base + c * channels, LANES, half);
        else
            for (int64_t c = 0; c < kept; c++) row[around + c] = widened(from, base + c * channels, count, half);
        for (int64_t c = around + kept; c < full; c++) row[c] = (Vector){0};
    }
}

/* sums[j] += row[o * stride + j * dilation] * gradient[o], for the taps of one row of the window. */
#define TAPS(NAME, K)                                                                                          \
    static void NAME(Vector *sums, const Vector *row, const Vector *gradient, int64_t outputs, int64_t stride,  \
                     int64_t dilation) {                                                                        \
        Vector s[K];                                                                                            \
        for (int j = 0; j < K; j++) s[j] = (Vector){0}; /* of this row: a long sum of small numbers loses them */ \
        for (int64_t o = 0; o < outputs; o++, row += stride)                                                    \
            for (int j = 0; j < K; j++) s[j] += row[j * dilation] * gradient[o];                                \
        for (int j = 0; j < K; j++) sums[j] += s[j];                                                            \
    }                                                                                                           \
    static void NAME##_back(Vector *row, const Vector *weights, const Vector *gradient, int64_t outputs,        \
                            int64_t stride, int64_t dilation) {                                                 \
        Vector w[K];                                                                                            \
        for (int j = 0; j < K; j++) w[j] = weights[j];                                                          \
        for (int64_t o = 0; o < outputs; o++, row += stride)                                                    \
            for (int j = 0; j < K; j++) row[j * dilation] += w[j] * gradient[o];                                \
    }
TAPS(taps1, 1)
TAPS(taps2, 2)
TAPS(taps3, 3)
TAPS(taps4, 4)
TAPS(taps5, 5)
TAPS(taps6, 6)
TAPS(taps7, 7)
TAPS(taps8, 8)
typedef void (*Sum)(Vector *, const Vector *, const Vector *, int64_t, int64_t, int64_t);
static const Sum SUMS[] = {0, taps1, taps2, taps3, taps4, taps5, taps6, taps7, taps8};
static const Sum BACKS[] = {0,          taps1_back, taps2_back, taps3_back, taps4_back,
                            taps5_back, taps6_back, taps7_back, taps8_back};
#define MOST 8

static void each(const Sum *table, Vector *a, int a_moves, const Vector *b, const Vector *g, int64_t k, int64_t outputs,
                 int64_t stride, int64_t dilation) {
    for (int64_t j = 0; j < k; j += MOST) {
        int64_t now = k - j < MOST ? k - j : MOST;
        if (a_moves) table[now](a + j * dilation, b + j, g, outputs, stride, dilation);
        else table[now](a + j, b + j * dilation, g, outputs, stride, dilation);
    }
}

/* Of a thread; NULL where there is none, and `failed` says so. */
static Vector *room(int64_t bytes, int *failed) {
    Vector *found = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!found) {
#pragma omp atomic write
        *failed = 1;
    }
    return found;
}

static int64_t band_of(const Shape *s, int64_t full) {
    int64_t rows = (1 << 18) / (full * sizeof(Vector) * s->stride[0]);
    return rows < 1 ? 1 : rows < s->out_height ? rows : s->out_height;
}

/* out: (groups, window rows, window columns, channels) of float: sums over the images of each group. */
int depthwise_weights(const void *x, const void *g, float *out, int64_t groups, const Shape *s) {
    int64_t kh = s->window[0], kw = s->window[1], full = s->width + 2 * s->padding[1];
    int64_t blocks = (s->channels + LANES - 1) / LANES, band = band_of(s, full);
    int64_t most = (band - 1) * s->stride[0] + (kh - 1) * s->dilation[0] + 1;
    int64_t each_x = s->height * s->width * s->channels, each_g = s->out_height * s->out_width * s->channels;
    int64_t bytes = (most * full + band * s->out_width + kh * kw) * sizeof(Vector);
    int failed = 0;
#pragma omp parallel num_threads(s->threads)
    {
        Vector *memory = room(bytes, &failed);
        Vector *rows = memory, *gradient = rows + most * full, *sums = gradient + band * s->out_width;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < groups * blocks; task++) {
            if (!memory) continue;
            int64_t group = task / blocks, channel = task % blocks * LANES;
            int64_t count = s->channels - channel < LANES ? s->channels - channel : LANES;
            memset(sums, 0, kh * kw * sizeof(Vector));
            for (int64_t n = group * s->images / groups; n < (group + 1) * s->images / groups; n++)
                for (int64_t top = 0; top < s->out_height; top += band) {
                    int64_t high = s->out_height - top < band ? s->out_height - top : band;
                    int64_t needed = (high - 1) * s->stride[0] + (kh - 1) * s->dilation[0] + 1;
                    const char *image = (const char *)x + n * each_x * (s->half ? 2 : 4);
                    const char *above = (const char *)g + n * each_g * (s->half ? 2 : 4);
                    widen_rows(rows, image, top * s->stride[0] - s->padding[0], needed, s->height, s->width,
                               s->padding[1], full, s->channels, channel, count, s->half);
                    widen_rows(gradient, above, top, high, s->out_height, s->out_width, 0, s->out_width, s->channels,
                               channel, count, s->half);
                    for (int64_t o = 0; o < high; o++)
                        for (int64_t i = 0; i < kh; i++)
                            each(SUMS, sums + i * kw, 0, rows + (o * s->stride[0] + i * s->dilation[0]) * full,
                                 gradient + o * s->out_width, kw, s->out_width, s->stride[1], s->dilation[1]);
                }
            for (int64_t k = 0; k < kh * kw; k++)
                narrowed(out + (group * kh * kw + k) * s->channels, channel, count, 0, sums[k]);
        }
        free(memory);
    }
    return failed;
}

/* weights: (window rows, window columns, channels) of float; out: as x. */
int depthwise_input(const float *weights, const void *g, void *out, const Shape *s) {
    int64_t kh = s->window[0], kw = s->window[1], around = s->padding[1], down = s->stride[0];
    int64_t reach = (s->out_width - 1) * s->stride[1] + (kw - 1) * s->dilation[1] + 1;
    int64_t full = s->width + 2 * around > reach ? s->width + 2 * around : reach;
    int64_t blocks = (s->channels + LANES - 1) / LANES, ring = (kh - 1) * s->dilation[0] / down + 1;
    int64_t each_x = s->height * s->width * s->channels, each_g = s->out_height * s->out_width * s->channels;
    int64_t bytes = (full + ring * s->out_width + kh * kw) * sizeof(Vector);
    int64_t chunk = s->images * blocks >= 4 * s->threads ? 2 : 1; /* two write to one line of the cache */
    int failed = 0;
#pragma omp parallel num_threads(s->threads)
    {
        Vector *memory = room(bytes, &failed);
        Vector *row = memory, *gradient = row + full, *taps = gradient + ring * s->out_width;
#pragma omp for schedule(dynamic, chunk)
        for (int64_t task = 0; task < s->images * blocks; task++) {
            if (!memory) continue;
            int64_t n = task / blocks, channel = task % blocks * LANES, widened_to = 0;
            int64_t count = s->channels - channel < LANES ? s->channels - channel : LANES;
            for (int64_t k = 0; k < kh * kw; k++) taps[k] = widened(weights, k * s->channels + channel, count, 0);
            const char *above = (const char *)g + n * each_g * (s->half ? 2 : 4);
            char *image = (char *)out + n * each_x * (s->half ? 2 : 4);
            for (int64_t r = 0; r < s->height; r++) {
                memset(row, 0, full * sizeof(Vector));
                for (int64_t i = kh - 1; i >= 0; i--) {
                    int64_t at = r + s->padding[0] - i * s->dilation[0], o = at / down;
                    if (at < 0 || at % down || o >= s->out_height) continue;
                    for (; widened_to <= o; widened_to++)
                        widen_rows(gradient + widened_to % ring * s->out_width, above, widened_to, 1, s->out_height,
                                   s->out_width, 0, s->out_width, s->channels, channel, count, s->half);
                    each(BACKS, row, 1, taps + i * kw, gradient + o % ring * s->out_width, kw, s->out_width,
                         s->stride[1], s->dilation[1]);
                }
                for (int64_t c = 0; c < s->width; c++)
                    narrowed(image, (r * s->width + c) * s->channels + channel, count, s->half, row[around + c]);
            }
        }
        free(memory);
    }
    return failed;
}
