/* One step of a recurrent layer, forward and backward, between the matrix products: all gates of a row in one pass.

   States are float; what products read and write is float or bfloat16. tanh follows the same book as e^x. */
#include "numbers.h"

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

static inline float tangent(float x) {
    float size = x < 0 ? -x : x, square = x * x, p = -5.70498872745e-3f;
    p = p * square + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    float small = p * square * x + x, large = 1.0f - 2.0f / (1.0f + exponential(2.0f * size));
    large = x < 0 ? -large : large;
    return size < 0.625f || x != x ? small : large;
}

enum { GRU, TANH, RELU, LSTM };

static inline int64_t gates_of(int64_t kind) { return kind == GRU ? 3 : kind == LSTM ? 4 : 1; }

static inline int64_t kept_of(int64_t kind) { return kind == GRU ? 4 : kind == LSTM ? 5 : 0; }

/* `given` and `recurrent` are what inputs and state give to each gate; a GRU keeps r, z, n and the state's part of n,
   an LSTM i, f, g, o and the cell's state before, others the new state alone. */
#define CELLS(TYPE, SUFFIX, WIDE, NARROW)                                                                             \
    static void gru_row##SUFFIX(const TYPE *restrict given, const TYPE *restrict recurrent, float *restrict state,   \
                                TYPE *restrict out, TYPE *restrict kept, int64_t width) {                             \
        for (int64_t n = 0; n < width; n++) {                                                                         \
            float own = WIDE(recurrent[2 * width + n]);                                                               \
            float reset = sigmoid(WIDE(given[n]) + WIDE(recurrent[n]));                                               \
            float update = sigmoid(WIDE(given[width + n]) + WIDE(recurrent[width + n]));                              \
            float fresh = tangent(WIDE(given[2 * width + n]) + reset * own);                                          \
            state[n] = fresh + update * (state[n] - fresh);                                                           \
            out[n] = NARROW(state[n]);                                                                                \
            kept[n] = NARROW(reset), kept[width + n] = NARROW(update);                                                \
            kept[2 * width + n] = NARROW(fresh), kept[3 * width + n] = NARROW(own);                                   \
        }                                                                                                             \
    }                                                                                                                 \
    static void lstm_row##SUFFIX(const TYPE *restrict given, const TYPE *restrict recurrent, float *restrict state,   \
                                 float *restrict cell, TYPE *restrict out, TYPE *restrict kept, int64_t width) {      \
        for (int64_t n = 0; n < width; n++) {                                                                         \
            float input = sigmoid(WIDE(given[n]) + WIDE(recurrent[n]));                                               \
            float forget = sigmoid(WIDE(given[width + n]) + WIDE(recurrent[width + n]));                              \
            float fresh = tangent(WIDE(given[2 * width + n]) + WIDE(recurrent[2 * width + n]));                       \
            float output = sigmoid(WIDE(given[3 * width + n]) + WIDE(recurrent[3 * width + n]));                      \
            kept[n] = NARROW(input), kept[width + n] = NARROW(forget), kept[2 * width + n] = NARROW(fresh);           \
            kept[3 * width + n] = NARROW(output), kept[4 * width + n] = NARROW(cell[n]);                              \
            cell[n] = forget * cell[n] + input * fresh;                                                               \
            state[n] = output * tangent(cell[n]);                                                                     \
            out[n] = NARROW(state[n]);                                                                                \
        }                                                                                                             \
    }                                                                                                                 \
    static void plain_row##SUFFIX(const TYPE *restrict given, const TYPE *restrict recurrent, float *restrict state, \
                                  TYPE *restrict out, int64_t width, int kind) {                                      \
        if (kind == TANH)                                                                                             \
            for (int64_t n = 0; n < width; n++) state[n] = tangent(WIDE(given[n]) + WIDE(recurrent[n]));              \
        else                                                                                                          \
            for (int64_t n = 0; n < width; n++) {                                                                     \
                float sum = WIDE(given[n]) + WIDE(recurrent[n]);                                                      \
                state[n] = sum < 0 ? 0 : sum;                                                                         \
            }                                                                                                         \
        for (int64_t n = 0; n < width; n++) out[n] = NARROW(state[n]);                                                \
    }                                                                                                                 \
    static void gru_back##SUFFIX(const TYPE *restrict gradient, float *restrict state, const TYPE *restrict before,  \
                                 const TYPE *restrict kept, TYPE *restrict given, TYPE *restrict recurrent,           \
                                 int64_t width) {                                                                     \
        for (int64_t n = 0; n < width; n++) {                                                                         \
            float reset = WIDE(kept[n]), update = WIDE(kept[width + n]), fresh = WIDE(kept[2 * width + n]);           \
            float all = WIDE(gradient[n]) + state[n], own = WIDE(kept[3 * width + n]);                                \
            float of_fresh = all * (1.0f - update) * (1.0f - fresh * fresh);                                          \
            float of_update = all * (WIDE(before[n]) - fresh) * update * (1.0f - update);                             \
            float of_reset = of_fresh * own * reset * (1.0f - reset);                                                 \
            state[n] = all * update;                                                                                  \
            given[n] = recurrent[n] = NARROW(of_reset);                                                               \
            given[width + n] = recurrent[width + n] = NARROW(of_update);                                              \
            given[2 * width + n] = NARROW(of_fresh), recurrent[2 * width + n] = NARROW(of_fresh * reset);             \
        }                                                                                                             \
    }                                                                                                                 \
    static void lstm_back##SUFFIX(const TYPE *restrict gradient, float *restrict state, float *restrict cell,         \
                                  const TYPE *restrict kept, TYPE *restrict given, int64_t width) {                   \
        for (int64_t n = 0; n < width; n++) {                                                                         \
            float input = WIDE(kept[n]), forget = WIDE(kept[width + n]), fresh = WIDE(kept[2 * width + n]);           \
            float output = WIDE(kept[3 * width + n]), before = WIDE(kept[4 * width + n]);                             \
            float now = tangent(forget * before + input * fresh), all = WIDE(gradient[n]) + state[n];                 \
            float of_cell = cell[n] + all * output * (1.0f - now * now);                                              \
            given[n] = NARROW(of_cell * fresh * input * (1.0f - input));                                              \
            given[width + n] = NARROW(of_cell * before * forget * (1.0f - forget));                                   \
            given[2 * width + n] = NARROW(of_cell * input * (1.0f - fresh * fresh));                                  \
            given[3 * width + n] = NARROW(all * now * output * (1.0f - output));                                      \
            cell[n] = of_cell * forget;                                                                               \
            state[n] = 0;                                                                                             \
        }                                                                                                             \
    }                                                                                                                 \
    static void plain_back##SUFFIX(const TYPE *restrict gradient, float *restrict state, const TYPE *restrict out,   \
                                   TYPE *restrict given, int64_t width, int kind) {                                   \
        for (int64_t n = 0; n < width; n++) {                                                                         \
            float now = WIDE(out[n]), slope = kind == TANH ? 1.0f - now * now : now > 0;                              \
            given[n] = NARROW((WIDE(gradient[n]) + state[n]) * slope);                                                \
            state[n] = 0;                                                                                             \
        }                                                                                                             \
    }                                                                                                                 \
    static void forward##SUFFIX(const TYPE *given, const TYPE *recurrent, float *state, float *cell, TYPE *out,       \
                                TYPE *kept, int64_t rows, int64_t width, int64_t kind, int64_t threads) {             \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                             \
        for (int64_t row = 0; row < rows; row++) {                                                                    \
            int64_t at = row * width;                                                                                 \
            const TYPE *from = given + at * gates_of(kind), *other = recurrent + at * gates_of(kind);                 \
            TYPE *keep = kept + at * kept_of(kind);                                                                   \
            if (kind == GRU) gru_row##SUFFIX(from, other, state + at, out + at, keep, width);                         \
            else if (kind == LSTM) lstm_row##SUFFIX(from, other, state + at, cell + at, out + at, keep, width);       \
            else plain_row##SUFFIX(from, other, state + at, out + at, width, kind);                                   \
        }                                                                                                             \
    }                                                                                                                 \
    static void backward##SUFFIX(const TYPE *gradient, float *state, float *cell, const TYPE *back, const TYPE *seen, \
                                 const TYPE *kept, TYPE *given, TYPE *recurrent, int64_t rows, int64_t width,         \
                                 int64_t kind, int64_t threads) {                                                     \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                             \
        for (int64_t row = 0; row < rows; row++) {                                                                    \
            int64_t at = row * width, gates = at * gates_of(kind);                                                    \
            const TYPE *keep = kept + at * kept_of(kind), *own = seen + at, *of_out = gradient + at;                  \
            TYPE *to = given + gates;                                                                                 \
            for (int64_t n = 0; n < width; n++) state[at + n] += WIDE(back[at + n]);                                  \
            if (kind == GRU) gru_back##SUFFIX(of_out, state + at, own, keep, to, recurrent + gates, width);           \
            else if (kind == LSTM) lstm_back##SUFFIX(of_out, state + at, cell + at, keep, to, width);                 \
            else plain_back##SUFFIX(of_out, state + at, own, to, width, kind);                                        \
        }                                                                                                             \
    }
CELLS(float, _float, SAME, SAME)
CELLS(uint16_t, _half, wide, narrow)

/* `out` gets the new state, which `state` becomes; `cell` is an LSTM's, and of others nothing. */
void forward(const void *given, const void *recurrent, float *state, float *cell, void *out, void *kept, int64_t rows,
             int64_t width, int64_t kind, int64_t half, int64_t threads) {
    if (half) forward_half(given, recurrent, state, cell, out, kept, rows, width, kind, threads);
    else forward_float(given, recurrent, state, cell, out, kept, rows, width, kind, threads);
}

/* `state` is the gradient of the state behind this step, and becomes what comes to the one before it without a
   product, as `cell` does; `back` is what the product of the step behind it gave. `seen` is the state before a GRU's
   step, or what another cell gave. */
void backward(const void *gradient, float *state, float *cell, const void *back, const void *seen, const void *kept,
              void *given, void *recurrent, int64_t rows, int64_t width, int64_t kind, int64_t half,
              int64_t threads) {
    if (half) backward_half(gradient, state, cell, back, seen, kept, given, recurrent, rows, width, kind, threads);
    else backward_float(gradient, state, cell, back, seen, kept, given, recurrent, rows, width, kind, threads);
}
