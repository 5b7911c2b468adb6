// Additive attention scores on the CPU, without a tanh and without a number stored per feature.
//
//   tanh(q + k) = 1 - 2 / (1 + exp(2q) exp(2k))
//
// so the exponentials are taken once per query and once per key, and a pair costs a product and a
// reciprocal, which four features share: u/a + v/b = (u b + v a) / (a b).
//
// Compiled by compiled.py; plain C++ without a header, so that it is built in a second or two.

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#else
#define VECTOR_BYTES 32
#endif

typedef long long Size;

template <typename Real> struct Types;
template <> struct Types<float> {
    typedef int Int;
    static constexpr int bits = 23;
    static constexpr float round = 12582912.0f + 127;  // adding it rounds, and makes an exponent
    static constexpr float power[] = {  // of 2, by the error-minimising polynomial on [-0.5, 0.5]
        0.00015461445f, 0.00134004282f, 0.00961805668f, 0.0555032723f, 0.240226509f, 0.693147207f,
        1.0f};
    static constexpr float in_range = 43;   // exp(2x) is a normal number up to here
    static constexpr float largest = 1e9f;  // its tanh is 1, the product of four does not overflow
    static constexpr float near = 10;       // exp(2 near) is below the largest
};
template <> struct Types<double> {
    typedef Size Int;
    static constexpr int bits = 52;
    static constexpr double round = 6755399441055744.0 + 1023;
    static constexpr double power[] = {
        4.4558179083360645e-10, 7.074194297288521e-09,  1.0178057087733941e-07,
        1.3215432535912375e-06, 1.5252733841556773e-05, 0.00015403530463724353,
        0.001333355814640647,   0.009618129107587256,   0.055504108664821625,
        0.24022650695910158,    0.6931471805599453,     1.0};
    static constexpr double in_range = 350, largest = 1e70, near = 80;
};

template <typename Real> struct Simd {
    typedef typename Types<Real>::Int Int;
    typedef Real Vec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(Real))));
    typedef Int Ints __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(Real))));
    static constexpr int lanes = VECTOR_BYTES / sizeof(Real);
};

// exp(2x) for |x| <= in_range. A NaN stays one.
template <typename Real>
static inline typename Simd<Real>::Vec exp_twice(typename Simd<Real>::Vec x) {
    typedef Types<Real> Type;
    const Real scale = 2.885390081777927;  // 2 / ln(2)
    typename Simd<Real>::Vec shifted = x * scale + Type::round, sum = {};
    typename Simd<Real>::Vec rest = x * scale - (shifted - Type::round);
    for (Real factor : Type::power) sum = sum * rest + factor;
    return sum * (typename Simd<Real>::Vec)((typename Simd<Real>::Ints)shifted << Type::bits);
}

template <typename Vec> static inline Vec larger(Vec a, Vec b) { return a < b ? b : a; }

// COUNT numbers of a row, zeros after them.
template <typename Real> static inline typename Simd<Real>::Vec load(const Real* x, Size count) {
    typename Simd<Real>::Vec v = {};
    if (count >= Simd<Real>::lanes) return *(const typename Simd<Real>::Vec*)x;
    for (Size i = 0; i < count; i++) v[i] = x[i];
    return v;
}

template <typename Real>
static inline void store(Real* x, typename Simd<Real>::Vec v, Size count) {
    if (count >= Simd<Real>::lanes)
        *(typename Simd<Real>::Vec*)x = v;
    else
        for (Size i = 0; i < count; i++) x[i] = v[i];
}

// The exponentials of COUNT numbers of a row; `most` follows the largest |x|, NaN aside.
template <typename Real>
static inline typename Simd<Real>::Vec exponentials(const Real* x, Size count,
                                                    typename Simd<Real>::Vec& most) {
    typename Simd<Real>::Vec v = load(x, count);
    most = larger(most, larger(v, -v));
    return exp_twice<Real>(v);
}

template <typename Real> static Real largest(typename Simd<Real>::Vec most) {
    Real found = 0;
    for (int i = 0; i < Simd<Real>::lanes; i++) found = found < most[i] ? most[i] : found;
    return found;
}

// How 1 + exp(2q) exp(2k) is formed: as it is, bounded from above, or not at all.
enum Range { Near, Far, Outside };

template <typename Real> static Range range(Real most_q, Real most_k) {
    typedef Types<Real> Type;
    if (!(most_q <= Type::in_range && most_k <= Type::in_range)) return Outside;
    return most_q + most_k <= Type::near ? Near : Far;
}

template <typename Real, Range range>
static inline typename Simd<Real>::Vec one_plus_product(typename Simd<Real>::Vec a,
                                                        typename Simd<Real>::Vec b) {
    typename Simd<Real>::Vec product = a * b;
    if (range == Near) return 1 + product;
    typename Simd<Real>::Vec bound = Types<Real>::largest - typename Simd<Real>::Vec{};
    return 1 + (bound < product ? bound : product);  // a NaN stays one
}

enum { PART = 256 };  // features of a panel, which stays in the nearest cache

// Takes what PART features give from the scores of ROWS queries against a panel of keys.
template <typename Real, Range range, int ROWS>
static void score_tile(const Real* exp_q, const Real* panel, const Real* weight, Real* scores,
                       Size N, Size D, Size part, Size width) {
    typedef typename Simd<Real>::Vec Vec;
    const int lanes = Simd<Real>::lanes;
    Vec sums[ROWS] = {};
    for (Size d = 0; d < part; d += 4) {
        Vec k[4];
        for (int i = 0; i < 4; i++) k[i] = *(const Vec*)(panel + (d + i) * lanes);
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) {
            Vec p[4];
            for (int i = 0; i < 4; i++)
                p[i] = one_plus_product<Real, range>(exp_q[row * D + d + i] - Vec{}, k[i]);
            Vec first = weight[d] * p[1] + weight[d + 1] * p[0], both = p[0] * p[1];
            Vec second = weight[d + 2] * p[3] + weight[d + 3] * p[2], others = p[2] * p[3];
            sums[row] += (first * others + second * both) / (both * others);
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++) {
        Real* out = scores + row * N;
        store(out, load(out, width) - 2 * sums[row], width);
    }
}

template <typename Real, Range range>
static void score_panel(const Real* exp_q, const Real* panel, const Real* weight, Real* scores,
                        Size T, Size N, Size D, Size part, Size width) {
    Size t = 0;
    for (; t + 4 <= T; t += 4)
        score_tile<Real, range, 4>(exp_q + t * D, panel, weight, scores + t * N, N, D, part, width);
    for (; t < T; t++)
        score_tile<Real, range, 1>(exp_q + t * D, panel, weight, scores + t * N, N, D, part, width);
}

// query (B*H, T, D), key (B*H, N, D), weight (H, D4), scores (B*H, T, N), exp_q scratch of shape
// (B*H, T, D4), where D4 is D up to a multiple of 4; what pads weight is zero. Returns whether all
// was in range; scores are of no use where it was not.
template <typename Real>
static int scores(const Real* query, const Real* key, const Real* weight, Real* scores, Real* exp_q,
                  Size BH, Size H, Size T, Size N, Size D, int threads) {
    typedef typename Simd<Real>::Vec Vec;
    const int lanes = Simd<Real>::lanes;
    const Size D4 = (D + 3) / 4 * 4, panels = (N + lanes - 1) / lanes;
    Vec most = {};
    for (Size row = 0; row < BH * T; row++)
        for (Size d = 0; d < D; d += lanes)
            store(exp_q + row * D4 + d, exponentials(query + row * D + d, D - d, most), D4 - d);
    const Real most_q = largest<Real>(most);
    int in_range = range<Real>(most_q, 0) != Outside;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(&& : in_range)
    for (Size task = 0; task < BH * panels; task++) {
        Size head = task / panels, first = task % panels * lanes;
        Size width = N - first < lanes ? N - first : lanes;
        const Real* w = weight + head % H * D4;
        Real* out = scores + head * T * N + first;
        Real total = 0, panel[PART * lanes] __attribute__((aligned(VECTOR_BYTES)));
        for (Size d = 0; d < D; d++) total += w[d];
        for (Size t = 0; t < T; t++)
            for (Size n = 0; n < width; n++) out[t * N + n] = total;
        for (Size start = 0; start < D4; start += PART) {
            Size part = D4 - start < PART ? D4 - start : PART;
            Vec most = {};
            for (Size d = 0; d < part; d += lanes) {
                Real rows[lanes][lanes] = {};
                for (Size n = 0; n < width; n++) {
                    const Real* row = key + (head * N + first + n) * D + start + d;
                    *(Vec*)rows[n] = exponentials(row, D - start - d, most);
                }
                for (int i = 0; i < lanes; i++)
                    for (int n = 0; n < lanes; n++) panel[(d + i) * lanes + n] = rows[n][i];
            }
            const Real* q = exp_q + head * T * D4 + start;
            switch (range<Real>(most_q, largest<Real>(most))) {
            case Near: score_panel<Real, Near>(q, panel, w + start, out, T, N, D4, part, width); break;
            case Far: score_panel<Real, Far>(q, panel, w + start, out, T, N, D4, part, width); break;
            case Outside: in_range = 0;
            }
        }
    }
    return in_range;
}

// Adds what four keys and T queries give to the sums of either, and to that of the tanh.
template <typename Real, Range range, bool whole>
static typename Simd<Real>::Vec
gradient_tile(const Real* exp_q, const Real* exp_k, const Real* grad, Real* sum_q, Real* sum_k,
              Size T, Size N, Size width) {
    typedef typename Simd<Real>::Vec Vec;
    const int lanes = Simd<Real>::lanes;
    Vec k[4], sums[4], tanhs = {};
    for (int i = 0; i < 4; i++) {
        k[i] = *(const Vec*)(exp_k + i * lanes);
        sums[i] = *(const Vec*)(sum_k + i * lanes);
    }
    for (Size t = 0; t < T; t++) {
        const Real* row = grad + t * N;
        Vec q = *(const Vec*)(exp_q + t * lanes), p[4], r[4], sum = *(const Vec*)(sum_q + t * lanes);
        for (int i = 0; i < 4; i++) p[i] = one_plus_product<Real, range>(q, k[i]);
        Vec left = p[0] * p[1], right = p[2] * p[3], twice = 2 / (left * right);
        left *= twice;  // now 2 / right
        right *= twice;
        r[0] = right * p[1], r[1] = right * p[0], r[2] = left * p[3], r[3] = left * p[2];
        for (int i = 0; i < 4; i++) {
            Vec g = (whole || i < width ? row[i] : 0) - Vec{}, tanh = 1 - r[i], product = g * tanh;
            Vec slope = g - product * tanh;
            tanhs += product;
            sum += slope;
            sums[i] += slope;
        }
        *(Vec*)(sum_q + t * lanes) = sum;
    }
    for (int i = 0; i < 4; i++) *(Vec*)(sum_k + i * lanes) = sums[i];
    return tanhs;
}

template <typename Real, Range range>
static typename Simd<Real>::Vec gradient_column(const Real* exp_q, const Real* exp_k,
                                                const Real* grad, Real* sum_q, Real* sum_k, Size T,
                                                Size N) {
    typename Simd<Real>::Vec tanhs = {};
    const Size lanes = Simd<Real>::lanes, tile = 64;  // rows of grad, which stay in the cache
    for (Size t = 0; t < T; t += tile) {
        Size rows = T - t < tile ? T - t : tile, n = 0;
        for (; n + 4 <= N; n += 4)
            tanhs += gradient_tile<Real, range, true>(exp_q + t * lanes, exp_k + n * lanes,
                                                grad + t * N + n, sum_q + t * lanes,
                                                sum_k + n * lanes, rows, N, 4);
        if (n < N)
            tanhs += gradient_tile<Real, range, false>(exp_q + t * lanes, exp_k + n * lanes,
                                                grad + t * N + n, sum_q + t * lanes,
                                                sum_k + n * lanes, rows, N, N - n);
    }
    return tanhs;
}

// The gradients from grad, that of the scores (B*H, T, N): to_query and to_key are as query and
// key, to_weight is (B*H, D). Returns as `scores` does.
template <typename Real>
static int gradients(const Real* query, const Real* key, const Real* weight, const Real* grad,
                     Real* to_query, Real* to_key, Real* to_weight, Size BH, Size H, Size T, Size N,
                     Size D, int threads) {
    typedef typename Simd<Real>::Vec Vec;
    const int lanes = Simd<Real>::lanes;
    const Size columns = (D + lanes - 1) / lanes, rows = (T + N + 3) * lanes;  // 3: a last tile
    int in_range = 1;
#pragma omp parallel num_threads(threads) reduction(&& : in_range)
    {
        Real* scratch = (Real*)__builtin_malloc(2 * rows * sizeof(Real));
        Real *exp_q = scratch, *exp_k = exp_q + T * lanes;
        Real *sum_q = exp_q + rows, *sum_k = sum_q + T * lanes;
#pragma omp for schedule(static)
        for (Size task = 0; task < BH * columns; task++) {
            Size head = task / columns, d = task % columns * lanes, count = D - d;
            Vec most_q = {}, most_k = {}, tanhs = {};
            __builtin_memset(scratch, 0, 2 * rows * sizeof(Real));
            for (Size t = 0; t < T; t++)
                *(Vec*)(exp_q + t * lanes) =
                    exponentials(query + (head * T + t) * D + d, count, most_q);
            for (Size n = 0; n < N; n++)
                *(Vec*)(exp_k + n * lanes) =
                    exponentials(key + (head * N + n) * D + d, count, most_k);
            const Real* g = grad + head * T * N;
            switch (range<Real>(largest<Real>(most_q), largest<Real>(most_k))) {
            case Near: tanhs = gradient_column<Real, Near>(exp_q, exp_k, g, sum_q, sum_k, T, N); break;
            case Far: tanhs = gradient_column<Real, Far>(exp_q, exp_k, g, sum_q, sum_k, T, N); break;
            case Outside: in_range = 0;
            }
            Vec w = load(weight + head % H * D + d, count);
            for (Size t = 0; t < T; t++)
                store(to_query + (head * T + t) * D + d, w * *(const Vec*)(sum_q + t * lanes), count);
            for (Size n = 0; n < N; n++)
                store(to_key + (head * N + n) * D + d, w * *(const Vec*)(sum_k + n * lanes), count);
            store(to_weight + head * D + d, tanhs, count);
        }
        __builtin_free(scratch);
    }
    return in_range;
}

#define EXPORT(Real, suffix)                                                                       \
    extern "C" int scores_##suffix(const Real* query, const Real* key, const Real* weight,         \
                                   Real* out, Real* exp_q, Size BH, Size H, Size T, Size N,        \
                                   Size D, int threads) {                                          \
        return scores<Real>(query, key, weight, out, exp_q, BH, H, T, N, D, threads);              \
    }                                                                                              \
    extern "C" int gradients_##suffix(const Real* query, const Real* key, const Real* weight,      \
                                      const Real* grad, Real* to_query, Real* to_key,              \
                                      Real* to_weight, Size BH, Size H, Size T, Size N, Size D,    \
                                      int threads) {                                               \
        return gradients<Real>(query, key, weight, grad, to_query, to_key, to_weight, BH, H, T, N, \
                               D, threads);                                                        \
    }

EXPORT(float, float32)
EXPORT(double, float64)
