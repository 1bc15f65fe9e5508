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

#define SAME(x) (x)
