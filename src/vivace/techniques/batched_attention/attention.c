/* Attention between its matrix products: softmax of each row of scores, and its gradient, in one pass.

   Scores, and what products read, are float or bfloat16; sums are float. A row is a query: of it the scores of all
   keys. What a mask forbids weighs nothing, and so does a whole row of which it forbids everything. */
#include <math.h>

#include "numbers.h"

enum { NONE, ALLOWED, ADDED, ADDED_HALF }; /* kinds of masks */

typedef struct {
    int64_t batch, heads, queries, keys, causal, kind, steps[4], threads; /* steps: of the mask, by axis */
    float scale, kept; /* what a kept weight is multiplied by */
} Shape;

/* What is added to a row's scores. */
static inline void begin(float *row, const void *mask, int64_t at, int64_t step, int64_t kind, int64_t keys) {
    if (kind == NONE)
        for (int64_t n = 0; n < keys; n++) row[n] = 0;
    else if (kind == ALLOWED) {
        const uint8_t *from = (const uint8_t *)mask + at;
        for (int64_t n = 0; n < keys; n++) row[n] = from[n * step] ? 0.0f : -INFINITY;
    } else if (kind == ADDED) {
        const float *from = (const float *)mask + at;
        for (int64_t n = 0; n < keys; n++) row[n] = from[n * step];
    } else {
        const uint16_t *from = (const uint16_t *)mask + at;
        for (int64_t n = 0; n < keys; n++) row[n] = wide(from[n * step]);
    }
}

static inline float weight(float x) { return x < -87.0f ? 0.0f : exponential(x); }

#define PASSES(TYPE, SUFFIX, WIDE, NARROW)                                                                            \
    static void forward##SUFFIX(const TYPE *scores, TYPE *weights, float *sums, const void *mask,                     \
                                const uint8_t *kept, const Shape *s) {                                                \
        int64_t keys = s->keys, rows = s->batch * s->heads * s->queries;                                              \
        _Pragma("omp parallel for num_threads(s->threads) schedule(static)")                                          \
        for (int64_t at = 0; at < rows; at++) {                                                                       \
            int64_t query = at % s->queries, head = at / s->queries % s->heads, in = at / s->queries / s->heads;      \
            int64_t seen = s->causal && query + 1 < keys ? query + 1 : keys;                                          \
            const TYPE *from = scores + at * keys;                                                                    \
            TYPE *row = weights + at * keys;                                                                          \
            const uint8_t *keep = kept ? kept + at * keys : kept;                                                     \
            float now[keys], most = -INFINITY, sum = 0;                                                               \
            begin(now, mask, in * s->steps[0] + head * s->steps[1] + query * s->steps[2], s->steps[3], s->kind,       \
                  seen);                                                                                              \
            _Pragma("omp simd reduction(max : most)")                                                                 \
            for (int64_t n = 0; n < seen; n++) {                                                                      \
                now[n] += WIDE(from[n]) * s->scale;                                                                   \
                most = now[n] > most ? now[n] : most;                                                                 \
            }                                                                                                         \
            most = most == -INFINITY ? 0.0f : most; /* or NaN alone */                                                \
            _Pragma("omp simd reduction(+ : sum)")                                                                    \
            for (int64_t n = 0; n < seen; n++) {                                                                      \
                now[n] = weight(now[n] - most);                                                                       \
                sum += now[n];                                                                                        \
            }                                                                                                         \
            float share = sum == 0 ? 0.0f : 1.0f / sum;                                                               \
            sums[2 * at] = most, sums[2 * at + 1] = share;                                                            \
            if (keep) {                                                                                               \
                float factor = share * s->kept;                                                                       \
                for (int64_t n = 0; n < seen; n++) row[n] = NARROW(now[n] * factor * keep[n]);                        \
            } else                                                                                                    \
                for (int64_t n = 0; n < seen; n++) row[n] = NARROW(now[n] * share);                                   \
            memset(row + seen, 0, (keys - seen) * sizeof(TYPE));                                                      \
        }                                                                                                             \
    }                                                                                                                 \
    static void backward##SUFFIX(TYPE *scores, TYPE *gradient, const float *sums, const void *mask,                   \
                                 const uint8_t *kept, const Shape *s) {                                               \
        int64_t keys = s->keys, rows = s->batch * s->heads * s->queries;                                              \
        _Pragma("omp parallel for num_threads(s->threads) schedule(static)")                                          \
        for (int64_t at = 0; at < rows; at++) {                                                                       \
            int64_t query = at % s->queries, head = at / s->queries % s->heads, in = at / s->queries / s->heads;      \
            int64_t seen = s->causal && query + 1 < keys ? query + 1 : keys;                                          \
            TYPE *row = scores + at * keys, *of = gradient + at * keys;                                               \
            const uint8_t *keep = kept ? kept + at * keys : kept;                                                     \
            float now[keys], given[keys], sum = 0, most = sums[2 * at], share = sums[2 * at + 1];                     \
            begin(now, mask, in * s->steps[0] + head * s->steps[1] + query * s->steps[2], s->steps[3], s->kind,       \
                  seen);                                                                                              \
            if (keep)                                                                                                 \
                for (int64_t n = 0; n < seen; n++) given[n] = WIDE(of[n]) * s->kept * keep[n];                        \
            else                                                                                                      \
                for (int64_t n = 0; n < seen; n++) given[n] = WIDE(of[n]);                                            \
            _Pragma("omp simd reduction(+ : sum)")                                                                    \
            for (int64_t n = 0; n < seen; n++) {                                                                      \
                now[n] = weight(now[n] + WIDE(row[n]) * s->scale - most) * share;                                     \
                sum += now[n] * given[n];                                                                             \
            }                                                                                                         \
            for (int64_t n = 0; n < seen; n++) of[n] = NARROW(now[n] * (given[n] - sum) * s->scale);                  \
            if (keep)                                                                                                 \
                for (int64_t n = 0; n < seen; n++) row[n] = NARROW(now[n] * s->kept * keep[n]);                       \
            else                                                                                                      \
                for (int64_t n = 0; n < seen; n++) row[n] = NARROW(now[n]);                                           \
            memset(row + seen, 0, (keys - seen) * sizeof(TYPE));                                                      \
            memset(of + seen, 0, (keys - seen) * sizeof(TYPE));                                                       \
        }                                                                                                             \
    }
PASSES(float, _float, SAME, SAME)
PASSES(uint16_t, _half, wide, narrow)

/* `scores` to weights, and to `sums`: each row's largest score, and one over the sum of what is e to the power of the
   others less that; `kept` says which weights are not dropped. */
void forward(const void *scores, void *weights, float *sums, const void *mask, const uint8_t *kept, int64_t half,
             const Shape *shape) {
    if (half) forward_half(scores, weights, sums, mask, kept, shape);
    else forward_float(scores, weights, sums, mask, kept, shape);
}

/* `scores` become weights again, and the `gradient` of weights that of scores. */
void backward(void *scores, void *gradient, const float *sums, const void *mask, const uint8_t *kept, int64_t half,
              const Shape *shape) {
    if (half) backward_half(scores, gradient, sums, mask, kept, shape);
    else backward_float(scores, gradient, sums, mask, kept, shape);
}
