/* What torch's CPU generator draws for `bernoulli_`, bit for bit, a block of the Mersenne Twister at a time.

   torch compares, number after number in the order of memory, the lowest 53 of 64 bits with a probability: the
   first 32-bit word of a pair is the upper half. Sources: M. Matsumoto, T. Nishimura, "Mersenne Twister", 1998;
   the bytes of `torch.Generator.get_state`. */
#include <stdint.h>

enum { WORDS = 624, MIDDLE = 397 };

typedef struct {
    uint64_t seed;
    int32_t left, seeded;
    uint64_t next, words[WORDS];
} State;

static uint32_t mixed(uint32_t above, uint32_t below) {
    uint32_t bits = (above & 0x80000000u) | (below & 0x7fffffffu);
    return (bits >> 1) ^ (-(below & 1u) & 0x9908b0dfu);
}

static void advance(uint32_t *w) {
    for (int n = 0; n < WORDS - MIDDLE; n++) w[n] = w[n + MIDDLE] ^ mixed(w[n], w[n + 1]);
    for (int n = WORDS - MIDDLE; n < WORDS - 1; n++) w[n] = w[n + MIDDLE - WORDS] ^ mixed(w[n], w[n + 1]);
    w[WORDS - 1] = w[MIDDLE - 1] ^ mixed(w[WORDS - 1], w[0]);
}

static void temper(uint32_t *to, const uint32_t *from, int first) {
    for (int n = first; n < WORDS; n++) {
        uint32_t y = from[n];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        to[n] = y ^ (y >> 18);
    }
}

#define FILL(NAME, TYPE)                                                                                          \
    static void NAME(void *out, const uint32_t *words, int64_t count, uint32_t high, uint32_t low, uint64_t bits) { \
        TYPE *to = out, one = (TYPE)bits;                                                                           \
        for (int64_t n = 0; n < count; n++) {                                                                       \
            uint32_t above = words[2 * n] & 0x1fffffu, below = words[2 * n + 1];                                    \
            to[n] = (above < high) | ((above == high) & (below < low)) ? one : 0;                                   \
        }                                                                                                           \
    }
FILL(fill1, uint8_t)
FILL(fill2, uint16_t)
FILL(fill4, uint32_t)
FILL(fill8, uint64_t)

/* Writes `count` numbers of `bytes` each: `one`, the bits of a one, where the number drawn is below `threshold` out
   of 2^53, else zeros. `state` goes on as torch's does. */
void draw(State *state, char *out, int64_t count, int64_t bytes, uint64_t one, uint64_t threshold) {
    uint32_t raw[WORDS], ready[WORDS + 1], high = threshold >> 32, low = (uint32_t)threshold;
    int left = state->left - 1, pending = 0; /* words of this block; the upper half of a pair from the one before */
    for (int n = 0; n < WORDS; n++) raw[n] = (uint32_t)state->words[n];
    temper(ready + 1, raw, WORDS - left);
    while (count) {
        if (!left) {
            advance(raw);
            temper(ready + 1, raw, 0);
            left = WORDS;
        }
        const uint32_t *words = ready + 1 + WORDS - left - pending;
        int64_t pairs = (left + pending) / 2 < count ? (left + pending) / 2 : count;
        switch (bytes) {
            case 1: fill1(out, words, pairs, high, low, one); break;
            case 2: fill2(out, words, pairs, high, low, one); break;
            case 4: fill4(out, words, pairs, high, low, one); break;
            default: fill8(out, words, pairs, high, low, one);
        }
        out += pairs * bytes;
        count -= pairs;
        left -= 2 * pairs - pending;
        pending = count && left;
        if (pending) ready[0] = ready[WORDS], left = 0;
    }
    state->left = left + 1;
    state->next = WORDS - left;
    for (int n = 0; n < WORDS; n++) state->words[n] = raw[n];
}
