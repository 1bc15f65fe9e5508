/* Training BatchNorm of feature maps in NHWC order: rows of pixels, a column for each channel. CHUNK rows are summed in
   float, and what came of them is put together in double, in an order that follows from the shape alone: with any number
   of threads the bits are the same. */
#include <math.h>
#include <stdlib.h>

#include "numbers.h"

#define CHUNK 64  /* rows that are summed in float */
#define SPLITS 32 /* parts of the rows at most, of LEAST chunks or more, each summed by one thread */
#define LEAST 4
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    int64_t rows, channels;
    int64_t half; /* are the maps in bfloat16? */
    int64_t threads;
} Shape;

/* DO(rows, count) for each vector of channels of a row, or of several rows. */
#define EACH_VECTOR(ROWS, DO)                              \
    {                                                      \
        int64_t k = 0, at = row * c;                       \
        for (; k + LANES <= c; k += LANES) DO(ROWS, LANES) \
        if (k < c) DO(ROWS, c - k)                         \
    }
#define EACH_ROW(FIRST, END, DO) \
    for (int64_t row = FIRST; row < END; row++) EACH_VECTOR(1, DO)
/* So many rows are added to sums before these are stored, where a row has few vectors, which would wait for that. */
#define TOGETHER 8
#define FEW 4
#define EACH_SUM(FIRST, END, DO)                                                                        \
    {                                                                                                   \
        int64_t row = FIRST;                                                                            \
        for (; c < FEW * LANES && row + TOGETHER <= END; row += TOGETHER) EACH_VECTOR(TOGETHER, DO)     \
        for (; row < END; row++) EACH_VECTOR(1, DO)                                                     \
    }

/* DO for all rows, CHUNK of them at a time, from `first` to `end`. */
#define EACH_CHUNK(DO)                                                   \
    _Pragma("omp parallel for schedule(static) num_threads(s->threads)") \
    for (int64_t first = 0; first < s->rows; first += CHUNK) {           \
        int64_t end = first + CHUNK < s->rows ? first + CHUNK : s->rows; \
        DO;                                                              \
    }

/* DO for each part `p` of the rows, from `first` to `end`, with room for its sums in double and in float. */
#define EACH_PART(DO)                                                                \
    _Pragma("omp parallel for schedule(static) num_threads(s->threads)")             \
    for (int64_t p = 0; p < parts; p++) {                                            \
        int64_t first = p * each, end = first + each < s->rows ? first + each : s->rows; \
        double *to = sums + p * 2 * c;                                               \
        float *few = (float *)(sums + parts * 2 * c) + p * 3 * padded(c);            \
        DO;                                                                          \
    }

static int64_t rows_a_part(int64_t rows) {
    int64_t chunks = (rows + CHUNK - 1) / CHUNK, each = (chunks + SPLITS - 1) / SPLITS;
    return (each < LEAST ? LEAST : each) * CHUNK;
}

/* Whole vectors. */
static int64_t padded(int64_t c) { return (c + LANES - 1) / LANES * LANES; }

static double *room_for(int64_t parts, int64_t c) {
    return calloc(parts, c * 2 * sizeof(double) + padded(c) * 3 * sizeof(float));
}

INLINE Vector all(const float *from) { return widened(from, 0, LANES, 0); }

INLINE void keep(float *to, Vector sums) { narrowed(to, 0, LANES, 0, sums); }

/* Means and sums of squared deviations of rows. Those of a chunk are taken from a number near its mean: that of the rows
   before, or of the chunk itself. */
INLINE void moments_of(const void *x, double *to, float *few, int64_t first, int64_t end, int64_t c, int half) {
    int64_t wide = padded(c);
    float *near = few + 2 * wide;
    for (int64_t begin = first; begin < end; begin += CHUNK) {
        int64_t stop = end - begin < CHUNK ? end : begin + CHUNK;
        double before = begin - first, here = stop - begin, part = here / (before + here);
        memset(few, 0, 3 * wide * sizeof(float));
#define SUM(ROWS, COUNT)                                                                            \
    {                                                                                               \
        Vector sum = all(near + k);                                                                 \
        for (int64_t r = 0; r < ROWS; r++) sum += widened(x, at + r * c + k, COUNT, half);          \
        keep(near + k, sum);                                                                        \
    }
        if (begin == first) EACH_SUM(begin, stop, SUM)
        for (int64_t k = 0; k < c; k++) near[k] = begin == first ? near[k] / here : to[k];
#define MOMENTS(ROWS, COUNT)                                                  \
    {                                                                         \
        Vector sum = all(few + k), squares = all(few + wide + k);             \
        for (int64_t r = 0; r < ROWS; r++) {                                  \
            Vector off = widened(x, at + r * c + k, COUNT, half) - all(near + k); \
            sum += off, squares += off * off;                                 \
        }                                                                     \
        keep(few + k, sum), keep(few + wide + k, squares);                    \
    }
        EACH_SUM(begin, stop, MOMENTS)
        for (int64_t k = 0; k < c; k++) {
            double apart = few[k] / here, squares = few[wide + k] - few[k] * apart, off = near[k] + apart - to[k];
            to[k] += off * part;
            to[c + k] += (squares < 0.0 ? 0.0 : squares) + off * off * before * part;
        }
    }
}

INLINE void normalise(const void *x, const float *affine, void *restrict result, int64_t first, int64_t end, int64_t c,
                      int half) {
#define NORMAL(ROWS, COUNT)                                                                                       \
    {                                                                                                             \
        Vector off = widened(x, at + k, COUNT, half) - widened(affine, k, COUNT, 0);                              \
        off = off * widened(affine, c + k, COUNT, 0) + widened(affine, 2 * c + k, COUNT, 0);                      \
        narrowed(result, at + k, COUNT, half, off);                                                               \
    }
    EACH_ROW(first, end, NORMAL)
}

/* A running statistic moved towards a new one, rounded where PyTorch rounds: of one that moves by 3e-4 of itself a rounding
   more would be seen. Products of floats are exact in double, so that none is fused with the sum. */
static float moved(float from, float to, double momentum) {
    float rate = momentum, rest = 1.0 - momentum, gained = (double)rate * to, kept = (double)rest * from;
    return gained + kept;
}

/* Mean and reciprocal deviation by channel, and the result; running statistics move by `momentum`. Weight and bias may be
   null, and so may both statistics. */
int forward(const void *x, const float *weight, const float *bias, float *running_mean, float *running_variance,
            double momentum, double epsilon, void *result, float *mean, float *rstd, const Shape *s) {
    int64_t c = s->channels, each = rows_a_part(s->rows), parts = (s->rows + each - 1) / each;
    double *sums = room_for(parts, c);
    float *affine = malloc(3 * c * sizeof(float));
    if (!sums || !affine) return free(sums), free(affine), 1;
    if (s->half) EACH_PART(moments_of(x, to, few, first, end, c, 1))
    else EACH_PART(moments_of(x, to, few, first, end, c, 0))
    for (int64_t p = 1; p < parts; p++) {
        double before = p * each, here = p + 1 < parts ? each : s->rows - p * each, part = here / (before + here);
        const double *more = sums + p * 2 * c;
        for (int64_t k = 0; k < c; k++) {
            double off = more[k] - sums[k];
            sums[k] += off * part;
            sums[c + k] += more[c + k] + off * off * before * part;
        }
    }
    for (int64_t k = 0; k < c; k++) {
        double squares = sums[c + k] / s->rows, deviation = 1.0 / sqrt(squares + epsilon);
        mean[k] = sums[k], rstd[k] = deviation, affine[k] = sums[k];
        if (running_mean) {
            squares = sums[c + k] / (s->rows - 1); /* here the unbiased one */
            running_mean[k] = moved(running_mean[k], sums[k], momentum);
            running_variance[k] = moved(running_variance[k], squares, momentum);
        }
        affine[c + k] = deviation * (weight ? weight[k] : 1.0), affine[2 * c + k] = bias ? bias[k] : 0.0f;
    }
    if (s->half) EACH_CHUNK(normalise(x, affine, result, first, end, c, 1))
    else EACH_CHUNK(normalise(x, affine, result, first, end, c, 0))
    free(sums), free(affine);
    return 0;
}

/* Sums of the gradient, and of its products with x less its mean. */
INLINE void sums_of(const void *gradient, const void *x, const float *mean, double *to, float *few, int64_t first,
                    int64_t end, int64_t c, int half) {
    int64_t wide = padded(c);
    for (int64_t begin = first; begin < end; begin += CHUNK) {
        int64_t stop = end - begin < CHUNK ? end : begin + CHUNK;
        memset(few, 0, 2 * wide * sizeof(float));
#define SUMS(ROWS, COUNT)                                                                     \
    {                                                                                         \
        Vector sum = all(few + k), products = all(few + wide + k), near = widened(mean, k, COUNT, 0); \
        for (int64_t r = 0; r < ROWS; r++) {                                                  \
            int64_t here = at + r * c + k;                                                    \
            Vector g = widened(gradient, here, COUNT, half);                                  \
            sum += g, products += g * (widened(x, here, COUNT, half) - near);                 \
        }                                                                                     \
        keep(few + k, sum), keep(few + wide + k, products);                                   \
    }
        EACH_SUM(begin, stop, SUMS)
        for (int64_t k = 0; k < c; k++) to[k] += few[k], to[c + k] += few[wide + k];
    }
}

INLINE void gradient_of(const void *gradient, const void *x, const float *mean, const float *factors, void *restrict for_x,
                        int64_t first, int64_t end, int64_t c, int half) {
#define GRADIENT(ROWS, COUNT)                                                                    \
    {                                                                                            \
        Vector g = widened(gradient, at + k, COUNT, half) - widened(factors, c + k, COUNT, 0);   \
        Vector off = widened(x, at + k, COUNT, half) - widened(mean, k, COUNT, 0);               \
        g = g * widened(factors, k, COUNT, 0) + off * widened(factors, 2 * c + k, COUNT, 0);     \
        narrowed(for_x, at + k, COUNT, half, g);                                                 \
    }
    EACH_ROW(first, end, GRADIENT)
}

/* The gradient of x (unless null), and of weight and bias by channel. */
int backward(const void *gradient, const void *x, const float *weight, const float *mean, const float *rstd, void *for_x,
             float *for_weight, float *for_bias, const Shape *s) {
    int64_t c = s->channels, each = rows_a_part(s->rows), parts = (s->rows + each - 1) / each;
    double *sums = room_for(parts, c);
    float *factors = malloc(3 * c * sizeof(float));
    if (!sums || !factors) return free(sums), free(factors), 1;
    if (s->half) EACH_PART(sums_of(gradient, x, mean, to, few, first, end, c, 1))
    else EACH_PART(sums_of(gradient, x, mean, to, few, first, end, c, 0))
    for (int64_t p = 1; p < parts; p++)
        for (int64_t k = 0; k < 2 * c; k++) sums[k] += sums[p * 2 * c + k];
    for (int64_t k = 0; k < c; k++) {
        double products = sums[c + k] * rstd[k], scale = rstd[k] * (weight ? weight[k] : 1.0);
        for_weight[k] = products, for_bias[k] = sums[k];
        factors[k] = scale, factors[c + k] = sums[k] / s->rows, factors[2 * c + k] = -scale * rstd[k] * products / s->rows;
    }
    if (for_x && s->half) EACH_CHUNK(gradient_of(gradient, x, mean, factors, for_x, first, end, c, 1))
    else if (for_x) EACH_CHUNK(gradient_of(gradient, x, mean, factors, for_x, first, end, c, 0))
    free(sums), free(factors);
    return 0;
}
