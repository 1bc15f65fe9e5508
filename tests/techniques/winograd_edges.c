/* Runs the kernels of src/vivace/techniques/winograd at the edges of small maps, for sanitizers to watch, and compares
   what they give with plain sums. Every array is as long as it must be, and no longer. */
#include "kernels.c"

#include <math.h>
#include <stdio.h>

static double worst;

static float *room(int64_t count) {
    float *found = malloc(4 * count);
    if (!found) exit(2);
    return found;
}

static float *numbers(int64_t count) {
    float *found = room(count);
    for (int64_t i = 0; i < count; i++) found[i] = (float)rand() / RAND_MAX - 0.5f;
    return found;
}

/* Planes of a result, for some tiles. */
static void multiplied(float *to, const float *x, const float *w, int64_t tiles, int64_t in, int64_t out,
                       int64_t plane) {
    for (int64_t p = 0; p < 36; p++)
        for (int64_t t = 0; t < tiles; t++)
            for (int64_t o = 0; o < out; o++) {
                float sum = 0;
                for (int64_t c = 0; c < in; c++) sum += x[(p * tiles + t) * in + c] * w[p * plane + o * in + c];
                to[(p * tiles + t) * out + o] = sum;
            }
}

static void summed(float *to, const float *x, const float *y, int64_t tiles, int64_t in, int64_t out) {
    for (int64_t p = 0; p < 36; p++)
        for (int64_t t = 0; t < tiles; t++)
            for (int64_t o = 0; o < out; o++)
                for (int64_t c = 0; c < in; c++)
                    to[(p * out + o) * in + c] += y[(p * tiles + t) * out + o] * x[(p * tiles + t) * in + c];
}

/* A number of the map, or zero outside of it. */
static double pixel(const float *x, int64_t n, int64_t y, int64_t at, int64_t c, const Shape *s) {
    if (y < 0 || at < 0 || y >= s->height || at >= s->width) return 0;
    return x[((n * s->height + y) * s->width + at) * s->channels + c];
}

static void seen(double wanted, double found) {
    if (!(fabs(wanted - found) <= worst)) worst = fabs(wanted - found);
}

static void compared(const float *x, const float *w, const float *b, const float *y, const float *gradient,
                     const float *of_weights, int64_t images, const Shape *in, const Shape *out, const Weights *where) {
    const int64_t *s = where->strides;
    for (int64_t o = 0; o < out->channels; o++)
        for (int64_t n = 0; n < images; n++)
            for (int64_t i = 0; i < out->height * out->width; i++) {
                double sum = b[o];
                for (int64_t c = 0; c < in->channels; c++)
                    for (int k = 0; k < 9; k++)
                        sum += pixel(x, n, i / out->width + k / 3 - in->top, i % out->width + k % 3 - in->left, c, in) *
                               w[o * s[0] + c * s[1] + k / 3 * s[2] + k % 3 * s[3]];
                seen(sum, y[(n * out->height * out->width + i) * out->channels + o]);
            }
    for (int64_t o = 0; o < out->channels; o++)
        for (int64_t c = 0; c < in->channels; c++)
            for (int k = 0; k < 9; k++) {
                double sum = 0;
                for (int64_t n = 0; n < images; n++)
                    for (int64_t i = 0; i < out->height * out->width; i++)
                        sum += pixel(x, n, i / out->width + k / 3 - in->top, i % out->width + k % 3 - in->left, c, in) *
                               gradient[(n * out->height * out->width + i) * out->channels + o];
                seen(sum, of_weights[o * s[0] + c * s[1] + k / 3 * s[2] + k % 3 * s[3]]);
            }
}

static void run(int64_t images, int64_t height, int64_t width, int64_t inputs, int64_t outputs, int64_t top,
                int64_t left, int64_t tiles, int64_t threads, int last) {
    int64_t high = height + 2 * top - 2, wide = width + 2 * left - 2;
    if (high < 1 || wide < 1) return;
    int64_t along = (high + 3) / 4, across = (wide + 3) / 4, all = images * along * across, size = outputs * inputs;
    Weights weights = {outputs, inputs, {9 * inputs, last ? 1 : 9, last ? 3 * inputs : 3, last ? inputs : 1},
                       size + 3, 0, threads};
    Shape in = {height, width, inputs, top, left, along, across, 0, 0, 0, threads}, out = in;
    out.height = high, out.width = wide, out.channels = outputs, out.top = out.left = 0;
    float *x = numbers(images * height * width * inputs), *w = numbers(9 * size), *bias = numbers(outputs);
    float *y = room(images * high * wide * outputs), *gradient = numbers(images * high * wide * outputs);
    float *factors = room(35 * weights.plane + size), *sums = room(36 * size), *of_weights = room(9 * size);
    memset(sums, 0, 4 * 36 * size);
    planes_of_weights(w, factors, &weights);
    for (int64_t first = 0; first < all; first += tiles) {
        in.first = out.first = first, in.count = out.count = all - first < tiles ? all - first : tiles;
        in.plane = in.count * inputs, out.plane = in.count * outputs;
        float *of_x = room(36 * in.plane), *of_y = room(36 * out.plane), *of_gradient = room(36 * out.plane);
        planes_of_input(x, of_x, &in);
        multiplied(of_y, of_x, factors, in.count, inputs, outputs, weights.plane);
        output_of(of_y, y, bias, &out);
        planes_of_gradient(gradient, of_gradient, &out);
        summed(sums, of_x, of_gradient, in.count, inputs, outputs);
        free(of_x), free(of_y), free(of_gradient);
    }
    weights.plane = size;
    weights_of(sums, of_weights, &weights);
    compared(x, w, bias, y, gradient, of_weights, images, &in, &out, &weights);
    free(x), free(w), free(bias), free(y), free(gradient), free(factors), free(sums), free(of_weights);
}

int main(void) {
    for (int h = 1; h <= 9; h++)
        for (int w = 1; w <= 9; w++)
            for (int p = 0; p < 9; p++)
                run(2, h, w, (h * 7 + w) % 20 + 1, (w * 5 + p) % 20 + 1, p / 3, p % 3, 3, 1 + (h + w) % 2, p % 2);
    for (int c = 1; c <= 20; c++)
        for (int o = 1; o <= 20; o += 3) run(1, 5, 6, c, o, 1, 1, 100, 2, c % 2);
    for (int c = 30; c <= 50; c++) run(1, 1, 7, c, c + 1, 1, 2, 1, 1, 0), run(1, 9, 1, c + 1, c, 2, 1, 2, 2, 1);
    if (!(worst < 1e-4)) fprintf(stderr, "off by %g\n", worst);
    return !(worst < 1e-4);
}
