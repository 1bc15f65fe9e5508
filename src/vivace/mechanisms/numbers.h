/* Numbers of C code of our own: bfloat16 as the upper half of a float, and e^x as S. Moshier computes it, "Methods and
   Programs for Mathematical Functions" (Cephes), 1989, to three units in the last place. */
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

#if defined(__AVX512BW__) && defined(__AVX512VL__) /* fewer than all lanes by a mask, else by a call */
#include <immintrin.h>
#define MASK(COUNT) ((1u << (COUNT)) - 1)
#define SOME_FLOATS(LANES_OF, FROM, COUNT) (LANES_OF) = (Vector)_mm512_maskz_loadu_ps(MASK(COUNT), FROM)
#define SOME_HALVES(LANES_OF, FROM, COUNT) (LANES_OF) = (Halves)_mm256_maskz_loadu_epi16(MASK(COUNT), FROM)
#define KEEP_FLOATS(TO, LANES_OF, COUNT) _mm512_mask_storeu_ps(TO, MASK(COUNT), (__m512)(LANES_OF))
#define KEEP_HALVES(TO, LANES_OF, COUNT) _mm256_mask_storeu_epi16(TO, MASK(COUNT), (__m256i)(LANES_OF))
#else
#define SOME_FLOATS(LANES_OF, FROM, COUNT) memcpy(&(LANES_OF), FROM, 4 * (COUNT))
#define SOME_HALVES(LANES_OF, FROM, COUNT) memcpy(&(LANES_OF), FROM, 2 * (COUNT))
#define KEEP_FLOATS(TO, LANES_OF, COUNT) memcpy(TO, &(LANES_OF), 4 * (COUNT))
#define KEEP_HALVES(TO, LANES_OF, COUNT) memcpy(TO, &(LANES_OF), 2 * (COUNT))
#endif

static inline float wide(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

static inline uint16_t narrow(float number) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &number, 4);
    uint16_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return number != number ? 0x7fc0 : rounded;
}

static inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x; /* leaves NaN */
    float rounded = x * 1.44269504f + 12582912.0f, n = rounded - 12582912.0f;
    float rest = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    uint32_t bits;
    memcpy(&bits, &rounded, 4);
    bits = (bits + 127) << 23; /* 2^n */
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

/* `count` numbers as a vector, and back, no byte beyond them touched; half: they are bfloat16. */
static inline Vector widened(const void *from, int64_t at, int64_t count, int half) {
    Vector wide = {0};
    Halves halves = {0};
    if (!half) {
        if (count == LANES) memcpy(&wide, (const float *)from + at, sizeof wide);
        else SOME_FLOATS(wide, (const float *)from + at, count);
        return wide;
    }
    if (count == LANES) memcpy(&halves, (const uint16_t *)from + at, sizeof halves);
    else SOME_HALVES(halves, (const uint16_t *)from + at, count);
    Bits bits = __builtin_convertvector(halves, Bits) << 16;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static inline void narrowed(void *to, int64_t at, int64_t count, int half, Vector wide) {
    if (!half) {
        if (count == LANES) memcpy((float *)to + at, &wide, sizeof wide);
        else KEEP_FLOATS((float *)to + at, wide, count);
        return;
    }
    Bits bits;
    memcpy(&bits, &wide, sizeof bits);
    Bits nan = (Bits)(wide != wide);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to the nearest, ties to even */
    bits = (bits & ~nan) | (0x7fc0 & nan);
    Halves halves = __builtin_convertvector(bits, Halves);
    if (count == LANES) memcpy((uint16_t *)to + at, &halves, sizeof halves);
    else KEEP_HALVES((uint16_t *)to + at, halves, count);
}

#define SAME(x) (x)
