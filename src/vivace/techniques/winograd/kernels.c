/* Convolutions with 3x3 windows over NHWC feature maps by F(4x4, 3x3): A. Lavin and S. Gray, "Fast Algorithms for
   Convolutional Neural Networks", 2015. Tiles of 6x6 pixels become 36 planes of (tiles, channels), which a matrix
   library multiplies; every transform here is of whole vectors of channels. The points are 0, 1, -1, 2, -2, infinity. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "numbers.h"

#define ALWAYS inline __attribute__((always_inline))

typedef struct {
    int64_t height, width, channels, top, left; /* of the map, and how far the first tile begins before it */
    int64_t tiles_high, tiles_wide, first, count, plane, threads; /* these tiles; floats from plane to plane */
} Shape;

typedef struct {
    int64_t outputs, inputs, strides[4], plane, flipped, threads;
} Weights;

static ALWAYS Vector taken(const float *from, int64_t count) {
    Vector found = {0};
    memcpy(&found, from, 4 * count);
    return found;
}

/* B: a tile's six numbers in a row or column. */
static inline void of_input(Vector *to, int64_t t, const Vector *d, int64_t s) {
    Vector even = d[4 * s] - 4 * d[2 * s], odd = d[3 * s] - 4 * d[s];
    Vector twice = d[4 * s] - d[2 * s], double_odd = 2 * (d[3 * s] - d[s]);
    to[0] = 4 * d[0] - 5 * d[2 * s] + d[4 * s];
    to[t] = even + odd;
    to[2 * t] = even - odd;
    to[3 * t] = twice + double_odd;
    to[4 * t] = twice - double_odd;
    to[5 * t] = 4 * d[s] - 5 * d[3 * s] + d[5 * s];
}

/* A: six products become four results. */
static inline void of_output(Vector *to, int64_t t, const Vector *m, int64_t s) {
    Vector sum = m[s] + m[2 * s], difference = m[s] - m[2 * s];
    Vector far = m[3 * s] + m[4 * s], far_difference = m[3 * s] - m[4 * s];
    to[0] = m[0] + sum + far;
    to[t] = difference + 2 * far_difference;
    to[2 * t] = sum + 4 * far;
    to[3 * t] = difference + 8 * far_difference + m[5 * s];
}

/* A transposed: four gradients of results become six of products. */
static inline void of_gradient(Vector *to, int64_t t, const Vector *g, int64_t s) {
    Vector even = g[0] + g[2 * s], odd = g[s] + g[3 * s];
    Vector far = g[0] + 4 * g[2 * s], far_odd = 2 * g[s] + 8 * g[3 * s];
    to[0] = g[0];
    to[t] = even + odd;
    to[2 * t] = even - odd;
    to[3 * t] = far + far_odd;
    to[4 * t] = far - far_odd;
    to[5 * t] = g[3 * s];
}

/* G: three weights become six, and G transposed: six gradients become three. */
static inline void of_weights(Vector *to, int64_t t, const Vector *w, int64_t s) {
    Vector sum = w[0] + w[2 * s], far = w[0] + 4 * w[2 * s];
    to[0] = w[0] * 0.25f;
    to[t] = (sum + w[s]) * (-1 / 6.0f);
    to[2 * t] = (sum - w[s]) * (-1 / 6.0f);
    to[3 * t] = (far + 2 * w[s]) * (1 / 24.0f);
    to[4 * t] = (far - 2 * w[s]) * (1 / 24.0f);
    to[5 * t] = w[2 * s];
}

static inline void back_to_weights(Vector *to, int64_t t, const Vector *u, int64_t s) {
    Vector sum = (u[s] + u[2 * s]) * (-1 / 6.0f), far = (u[3 * s] + u[4 * s]) * (1 / 24.0f);
    to[0] = u[0] * 0.25f + sum + far;
    to[t] = (u[2 * s] - u[s]) * (1 / 6.0f) + (u[3 * s] - u[4 * s]) * (1 / 12.0f);
    to[2 * t] = sum + 4 * far + u[5 * s];
}

/* The pixels of a tile as rows of `width` pixels, where a part of it lies outside of the map: zeros there. */
static void gathered(float *to, const float *image, int64_t y, int64_t x, int64_t size, const Shape *s) {
    int64_t c = s->channels, before = x < 0 ? -x : 0, after = x + size > s->width ? x + size - s->width : 0;
    int64_t kept = size - before - after;
    memset(to, 0, 4 * size * size * c);
    for (int64_t i = 0; i < size; i++)
        if (y + i >= 0 && y + i < s->height && kept > 0)
            memcpy(to + (i * size + before) * c, image + ((y + i) * s->width + x + before) * c, 4 * kept * c);
}

static ALWAYS void planes_of(float *to, const float *tile, int64_t row, int64_t count, int size, const Shape *s) {
    Vector pixels[36], half[36];
    int64_t c = s->channels;
    for (int i = 0; i < size; i++)
        for (int j = 0; j < size; j++) pixels[i * size + j] = taken(tile + i * row + j * c, count);
    for (int j = 0; j < size; j++)
        if (size == 6) of_input(half + j, 6, pixels + j, 6);
        else of_gradient(half + j, 4, pixels + j, 4);
    for (int i = 0; i < 6; i++) {
        Vector found[6];
        if (size == 6) of_input(found, 1, half + i * 6, 1);
        else of_gradient(found, 1, half + i * 4, 1);
        for (int j = 0; j < 6; j++) memcpy(to + (i * 6 + j) * s->plane, found + j, 4 * count);
    }
}

static ALWAYS int into_planes(const float *map, float *planes, int size, const Shape *s) {
    int64_t tiles = s->tiles_high * s->tiles_wide, c = s->channels;
    int failed = 0;
#pragma omp parallel num_threads(s->threads)
    {
        float *room = malloc(4 * size * size * c);
        if (!room) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < s->count; t++) {
            if (!room) continue;
            int64_t number = s->first + t, y = number % tiles / s->tiles_wide * 4 - s->top;
            int64_t x = number % tiles % s->tiles_wide * 4 - s->left;
            const float *image = map + number / tiles * s->height * s->width * c, *tile = room;
            int64_t row = size * c;
            if (y < 0 || x < 0 || y + size > s->height || x + size > s->width)
                gathered(room, image, y, x, size, s);
            else tile = image + (y * s->width + x) * c, row = s->width * c;
            float *to = planes + t * c;
            int64_t k = 0;
            for (; k + LANES <= c; k += LANES) planes_of(to + k, tile + k, row, LANES, size, s);
            if (k < c) planes_of(to + k, tile + k, row, c - k, size, s);
        }
        free(room);
    }
    return failed;
}

int planes_of_input(const float *map, float *planes, const Shape *s) { return into_planes(map, planes, 6, s); }

int planes_of_gradient(const float *map, float *planes, const Shape *s) { return into_planes(map, planes, 4, s); }

static ALWAYS void four_by_four(float *image, const float *planes, const float *bias, int64_t y, int64_t x,
                                int64_t count, const Shape *s) {
    Vector products[36], half[24], start = bias ? taken(bias, count) : (Vector){0};
    for (int i = 0; i < 36; i++) products[i] = taken(planes + i * s->plane, count);
    for (int j = 0; j < 6; j++) of_output(half + j, 6, products + j, 6);
    for (int64_t i = 0; i < 4 && y + i < s->height; i++) {
        Vector found[4];
        of_output(found, 1, half + i * 6, 1);
        for (int64_t j = 0; j < 4 && x + j < s->width; j++) {
            found[j] += start;
            memcpy(image + ((y + i) * s->width + x + j) * s->channels, found + j, 4 * count);
        }
    }
}

int output_of(const float *planes, float *map, const float *bias, const Shape *s) {
    int64_t tiles = s->tiles_high * s->tiles_wide, c = s->channels;
#pragma omp parallel for num_threads(s->threads) schedule(static)
    for (int64_t t = 0; t < s->count; t++) {
        int64_t number = s->first + t, y = number % tiles / s->tiles_wide * 4;
        int64_t x = number % tiles % s->tiles_wide * 4, k = 0;
        float *image = map + number / tiles * s->height * s->width * c;
        const float *from = planes + t * c;
        for (; k + LANES <= c; k += LANES)
            four_by_four(image + k, from + k, bias ? bias + k : 0, y, x, LANES, s);
        if (k < c) four_by_four(image + k, from + k, bias ? bias + k : 0, y, x, c - k, s);
    }
    return 0;
}

static ALWAYS void transformed_weights(float *planes, const float *from, int64_t count, int unit, const Weights *w) {
    Vector window[9], half[18], found[36];
    for (int i = 0; i < 9; i++) {
        int at = w->flipped ? 8 - i : i;
        const float *tap = from + at / 3 * w->strides[2] + at % 3 * w->strides[3];
        if (unit) window[i] = taken(tap, count);
        else {
            window[i] = (Vector){0};
            for (int j = 0; j < count; j++) window[i][j] = tap[j * w->strides[1]];
        }
    }
    for (int j = 0; j < 3; j++) of_weights(half + j, 3, window + j, 3);
    for (int i = 0; i < 6; i++) of_weights(found + i * 6, 1, half + i * 3, 1);
    for (int i = 0; i < 36; i++) memcpy(planes + i * w->plane, found + i, 4 * count);
}

static ALWAYS void gradients_of_weights(float *to, const float *planes, int64_t count, int unit, const Weights *w) {
    Vector sums[36], half[18], found[9];
    for (int i = 0; i < 36; i++) sums[i] = taken(planes + i * w->plane, count);
    for (int j = 0; j < 6; j++) back_to_weights(half + j, 6, sums + j, 6);
    for (int i = 0; i < 3; i++) back_to_weights(found + i * 3, 1, half + i * 6, 1);
    for (int i = 0; i < 9; i++) {
        float *tap = to + i / 3 * w->strides[2] + i % 3 * w->strides[3];
        if (unit) memcpy(tap, found + i, 4 * count);
        else
            for (int j = 0; j < count; j++) tap[j * w->strides[1]] = found[i][j];
    }
}

/* WORK for vectors of the inputs' channels of each output, whole ones first, in both orders of memory. */
#define EACH_VECTOR(WORK, TO, FROM)                                                   \
    _Pragma("omp parallel for num_threads(w->threads) schedule(static)")              \
    for (int64_t o = 0; o < w->outputs; o++) {                                        \
        int64_t k = 0, unit = w->strides[1] == 1;                                     \
        if (unit) for (; k + LANES <= w->inputs; k += LANES) WORK(TO, FROM, LANES, 1, w); \
        else for (; k + LANES <= w->inputs; k += LANES) WORK(TO, FROM, LANES, 0, w);  \
        if (k < w->inputs) WORK(TO, FROM, w->inputs - k, 0, w);                       \
    }                                                                                 \
    return 0;

/* planes: 36 times (outputs, inputs); with `flipped` of the window turned by half a circle. */
int planes_of_weights(const float *weights, float *planes, const Weights *w) {
    EACH_VECTOR(transformed_weights, planes + o * w->inputs + k, weights + o * w->strides[0] + k * w->strides[1])
}

int weights_of(const float *planes, float *weights, const Weights *w) {
    EACH_VECTOR(gradients_of_weights, weights + o * w->strides[0] + k * w->strides[1], planes + o * w->inputs + k)
}
