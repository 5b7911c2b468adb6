// Additive attention scores on the CPU, without a tanh and without a number stored per feature.
//
//   tanh(q + k) = 1 - 2 / (1 + exp(2q) exp(2k))
//
// so the exponentials are taken once per query and once per key, and a pair costs a product and a
// reciprocal, which two features share: u/a + v/b = (u b + v a) / (a b).
//
// Compiled by compiled.py; plain C++ without a header, so that it is built in about a second.

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#else
#define VECTOR_BYTES 32
#endif

typedef long long Size;

template <typename Real> struct Simd {
    typedef Real Vec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(Real))));
    enum { lanes = VECTOR_BYTES / sizeof(Real) };
};

// Past this the tanh is 1 in either type, and the product of two such numbers does not overflow.
template <typename Real> struct Largest;
template <> struct Largest<float> { static constexpr float value = 1e18f; };
template <> struct Largest<double> { static constexpr double value = 1e150; };

template <typename Vec, typename Real> static inline Vec one_plus_product(Vec a, Vec b) {
    Vec largest = Vec{} + Largest<Real>::value;
    Vec product = a * b;
    return 1 + (largest < product ? largest : product);  // a NaN stays one
}

// Scores of ROWS queries against the keys that fit two vectors.
template <typename Real, int ROWS>
static void score_tile(const Real* exp_q, const Real* exp_k, const Real* weight, Real total,
                       Real* scores, Size N, Size D, Size stride, Size width) {
    typedef typename Simd<Real>::Vec Vec;
    const int lanes = Simd<Real>::lanes;
    Vec sums[ROWS][2] = {};
    for (Size d = 0; d < D; d += 2) {
        for (int half = 0; half < 2; half++) {
            const Real* column = exp_k + d * stride + half * lanes;
            Vec first_k = *(const Vec*)column, second_k = *(const Vec*)(column + stride);
            for (int row = 0; row < ROWS; row++) {
                Vec first = one_plus_product<Vec, Real>(Vec{} + exp_q[row * D + d], first_k);
                Vec second = one_plus_product<Vec, Real>(Vec{} + exp_q[row * D + d + 1], second_k);
                sums[row][half] += (weight[d] * second + weight[d + 1] * first) / (first * second);
            }
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (Size n = 0; n < width; n++)
            scores[row * N + n] = total - 2 * sums[row][n / lanes][n % lanes];
}

// exp_q (B*H, T, D), exp_k (B*H, D, stride) with the keys last, weight (H, D), scores (B*H, T, N).
// D is even, and stride a multiple of two vectors; what pads them is zero.
template <typename Real>
static void scores(const Real* exp_q, const Real* exp_k, const Real* weight, Real* scores, Size BH,
                   Size H, Size T, Size N, Size D, Size stride, int threads) {
    const Size rows = 4, blocks = (T + rows - 1) / rows, step = 2 * Simd<Real>::lanes;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (Size task = 0; task < BH * blocks; task++) {
        Size head = task / blocks, t = task % blocks * rows;
        const Real* w = weight + head % H * D;
        Real total = 0;
        for (Size d = 0; d < D; d++) total += w[d];
        for (Size n = 0; n < N; n += step) {
            Size width = N - n < step ? N - n : step;
            const Real* q = exp_q + (head * T + t) * D;
            const Real* k = exp_k + head * D * stride + n;
            Real* out = scores + (head * T + t) * N + n;
            if (T - t >= rows)
                score_tile<Real, 4>(q, k, w, total, out, N, D, stride, width);
            else
                for (Size row = 0; row < T - t; row++)
                    score_tile<Real, 1>(q + row * D, k, w, total, out + row * N, N, D, stride, width);
        }
    }
}

// The gradients from grad, that of the scores (B*H, T, N). With r = 1 / (1 + exp(2q) exp(2k)) the
// derivative of the tanh is 4 r (1 - r). Here exp_k is (B*H, N, D) and D a multiple of a vector;
// grad_q and grad_k are (B*H, T, D) and (B*H, N, D), grad_weight is (B*H, D).
template <typename Real>
static void gradients(const Real* exp_q, const Real* exp_k, const Real* weight, const Real* grad,
                      Real* grad_q, Real* grad_k, Real* grad_weight, Size BH, Size H, Size T,
                      Size N, Size D, int threads) {
    typedef typename Simd<Real>::Vec Vec;
    const int lanes = Simd<Real>::lanes;
    const Size columns = D / lanes, tile = 32;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (Size task = 0; task < BH * columns; task++) {
        Size head = task / columns, d = task % columns * lanes;
        const Real* q = exp_q + head * T * D + d;
        const Real* k = exp_k + head * N * D + d;
        const Real* g = grad + head * T * N;
        Real* to_q = grad_q + head * T * D + d;
        Real* to_k = grad_k + head * N * D + d;
        Vec slope = 4 * *(const Vec*)(weight + head % H * D + d), tanhs = {};  // half of them
        for (Size t = 0; t < T; t++) *(Vec*)(to_q + t * D) = Vec{};
        for (Size start = 0; start < N; start += tile) {
            Size width = N - start < tile ? N - start : tile;
            Vec keys[tile] = {}, sums[tile] = {};
            for (Size n = 0; n < width; n++) keys[n] = *(const Vec*)(k + (start + n) * D);
            for (Size t = 0; t < T; t++) {
                Vec query = *(const Vec*)(q + t * D), sum = {}, row_tanhs = {};
                const Real* row = g + t * N + start;
                for (Size n = 0; n < width; n += 2) {  // an odd last pair meets a key of zeros
                    Real g0 = row[n], g1 = n + 1 < width ? row[n + 1] : 0;
                    Vec p0 = one_plus_product<Vec, Real>(query, keys[n]);
                    Vec p1 = one_plus_product<Vec, Real>(query, keys[n + 1]);
                    Vec both = 1 / (p0 * p1), r0 = p1 * both, r1 = p0 * both;
                    Vec s0 = g0 * (r0 - r0 * r0), s1 = g1 * (r1 - r1 * r1);
                    sum += s0 + s1;
                    sums[n] += s0;
                    sums[n + 1] += s1;
                    row_tanhs += g0 * ((Real)0.5 - r0) + g1 * ((Real)0.5 - r1);
                }
                *(Vec*)(to_q + t * D) += sum;
                tanhs += row_tanhs;
            }
            for (Size n = 0; n < width; n++) *(Vec*)(to_k + (start + n) * D) = slope * sums[n];
        }
        for (Size t = 0; t < T; t++) *(Vec*)(to_q + t * D) *= slope;
        *(Vec*)(grad_weight + head * D + d) = 2 * tanhs;
    }
}

#define EXPORT(Real, suffix)                                                                       \
    extern "C" void scores_##suffix(const Real* exp_q, const Real* exp_k, const Real* weight,      \
                                    Real* out, Size BH, Size H, Size T, Size N, Size D,            \
                                    Size stride, int threads) {                                    \
        scores<Real>(exp_q, exp_k, weight, out, BH, H, T, N, D, stride, threads);                  \
    }                                                                                              \
    extern "C" void gradients_##suffix(const Real* exp_q, const Real* exp_k, const Real* weight,   \
                                       const Real* grad, Real* grad_q, Real* grad_k,               \
                                       Real* grad_weight, Size BH, Size H, Size T, Size N, Size D, \
                                       int threads) {                                              \
        gradients<Real>(exp_q, exp_k, weight, grad, grad_q, grad_k, grad_weight, BH, H, T, N, D,   \
                        threads);                                                                  \
    }

EXPORT(float, float32)
EXPORT(double, float64)
