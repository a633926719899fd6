// Products of a few rows with a weight matrix on a CPU; compiled by native.py at first use.
//
// Each output is one dot product along the inputs, whose terms are added in an order that depends on the number of inputs
// alone: not on how many rows are multiplied together, nor on the number of threads. So a row's product is the same to the bit
// whether the row is alone or one of a block.

#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int V = 16, GROUP = 6;  // floats in a register; rows of x that are multiplied at once, as registers allow
#else
constexpr int V = 8, GROUP = 3;
#endif
constexpr int CHAINS = 4;    // vectors that sums are kept in: as many as hide the time an addition takes
constexpr int ROWS = 4;      // of the weight, multiplied at once
constexpr int BLOCK = 512;   // inputs widened at a time, whole turns of the chains
constexpr int NEAR = 4096;   // inputs beyond which a row of x leaves the first-level cache, and is better read for several rows
constexpr int AHEAD = 512;   // bytes
constexpr int STRIDE = BLOCK + 16;  // of widened rows: at a power of two they would take each other's place in the cache
constexpr int FEW = 3;       // rows of x for which a weight is widened in registers
constexpr int MOST = 64;     // rows of x

typedef float Floats __attribute__((vector_size(4 * V), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * V), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * V), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * V), aligned(2)));
typedef int8_t Bytes __attribute__((vector_size(V), aligned(1)));

struct BFloat16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(int8_t x) { return x; }
inline float widen(BFloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, BFloat16* to) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Floats load(const float* p) { return *reinterpret_cast<const Floats*>(p); }
inline Floats load(const int8_t* p) {
#if defined(__AVX512F__)  // compilers make many instructions of the general form
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const Bytes*>(p), Ints), Floats);
#endif
}
inline Floats load(const BFloat16* p) {
#if defined(__AVX512F__)
    __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
    return _mm512_castsi512_ps(wide);
#elif defined(__AVX2__)
    __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
    return _mm256_castsi256_ps(wide);
#else
    Words wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), Words) << 16;
    Floats same;
    std::memcpy(&same, &wide, sizeof same);
    return same;
#endif
}

inline Floats multiplied(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, sum);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, sum);
#else
    return sum + a * b;
#endif
}

inline float sum_of(Floats x) {
    float lanes[V];
    std::memcpy(lanes, &x, sizeof x);
    for (int half = V / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

// The terms of a dot product are added up in CHAINS vectors in turn, and these in their order at the end.
inline float dot_of(const Floats* total, float tail) {
    Floats sum = total[0];
    for (int u = 1; u < CHAINS; u++) sum += total[u];
    return sum_of(sum) + tail;
}

// What whole vectors leave over.
template <class W>
inline float tail_of(const W* w, const float* x, int64_t K) {
    float sum = 0;
    for (int64_t k = K / V * V; k < K; k++) sum += widen(w[k]) * x[k];
    return sum;
}

// sums[r][c] = row r of the weight · row c of x, for few rows of x. A single row of the weight is read from end to end, as
// processors foresee it; several are asked for AHEAD of their use.
template <int R, int C, class W>
inline void few_dots(const W* w, const float* x, int64_t K, float (*sums)[MOST]) {
    Floats total[R][C][CHAINS] = {};
    auto step = [&](int64_t k, int u) {
        for (int r = 0; r < R; r++) {
            Floats row = load(w + r * K + k);
            for (int c = 0; c < C; c++) total[r][c][u] = multiplied(row, load(x + c * K + k), total[r][c][u]);
        }
    };
    int64_t k = 0;
    for (; k + CHAINS * V <= K; k += CHAINS * V) {
        for (int r = 0; R > 1 && r < R; r++) __builtin_prefetch(reinterpret_cast<const char*>(w + r * K + k) + AHEAD);
        for (int u = 0; u < CHAINS; u++) step(k + u * V, u);
    }
    for (int u = 0; k + V <= K; k += V, u++) step(k, u);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sums[r][c] = dot_of(total[r][c], tail_of(w + r * K, x + c * K, K));
}

// totals[r][c] += row r of the widened weight · row c of x, over n inputs; whole vectors alone.
template <int R, int C>
inline void tile(const float (*w)[STRIDE], const float* x, int64_t x_stride, int64_t n, Floats (*totals)[MOST][CHAINS]) {
    for (int u = 0; u < CHAINS; u++) {
        Floats total[R][C];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) total[r][c] = totals[r][c][u];
        for (int64_t k = u * V; k + V <= n; k += CHAINS * V) {
            Floats columns[C];
            for (int c = 0; c < C; c++) {
                columns[c] = load(x + c * x_stride + k);
#ifdef __AVX__
                asm("" : "+v"(columns[c]));  // stays in a register: compilers would load it anew for each row
#endif
            }
            for (int r = 0; r < R; r++) {
                Floats row = load(&w[r][k]);
                for (int c = 0; c < C; c++) total[r][c] = multiplied(row, columns[c], total[r][c]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) totals[r][c][u] = total[r][c];
    }
}

// sums[r][t] = row r of the weight · row t of x, for many rows of x: the weight is widened a block at a time, once for all.
template <int R, class W>
inline void block_dots(const W* w, const float* x, int64_t T, int64_t K, float (*sums)[MOST]) {
    float wide[R][STRIDE];
    Floats totals[R][MOST][CHAINS];
    for (int r = 0; r < R; r++) std::memset(totals[r], 0, T * sizeof(totals[r][0]));
    for (int64_t start = 0; start < K; start += BLOCK) {
        int64_t n = K - start < BLOCK ? K - start : BLOCK;
        const W* here = w + start;
        for (int r = 0; r < R; r++)
            for (int64_t k = 0; k + V <= n; k += V) {
                *reinterpret_cast<Floats*>(&wide[r][k]) = load(here + r * K + k);
                __builtin_prefetch(here + (r + R) * K + k);
            }
        auto at = [&](int64_t t) { return reinterpret_cast<Floats (*)[MOST][CHAINS]>(&totals[0][t]); };
        int64_t t = 0;
        for (; t + GROUP <= T; t += GROUP) tile<R, GROUP>(wide, x + t * K + start, K, n, at(t));
        for (; t + 2 <= T; t += 2) tile<R, 2>(wide, x + t * K + start, K, n, at(t));
        for (; t < T; t++) tile<R, 1>(wide, x + t * K + start, K, n, at(t));
    }
    for (int r = 0; r < R; r++)
        for (int64_t t = 0; t < T; t++) sums[r][t] = dot_of(totals[r][t], tail_of(w + r * K, x + t * K, K));
}

template <int R, class W, class X>
void rows(const W* w, const float* x, const float* scale, const X* bias, X* out, int64_t T, int64_t N, int64_t K, int64_t first) {
    float sums[R][MOST];
    const W* here = w + first * K;
    if (T > FEW) {
        block_dots<R>(here, x, T, K, sums);
    } else if (T == 1 && K > NEAR) {
        few_dots<R, 1>(here, x, K, sums);
    } else {
        for (int r = 0; r < R; r++) {
            if (T == 1) few_dots<1, 1>(here + r * K, x, K, sums + r);
            if (T == 2) few_dots<1, 2>(here + r * K, x, K, sums + r);
            if (T == 3) few_dots<1, 3>(here + r * K, x, K, sums + r);
        }
    }
    for (int r = 0; r < R; r++)
        for (int64_t t = 0; t < T; t++) {
            float sum = scale ? sums[r][t] * scale[first + r] : sums[r][t];
            narrow(bias ? sum + widen(bias[first + r]) : sum, out + t * N + first + r);
        }
}

template <class W, class X>
void product(const W* w, const float* x, const float* scale, const X* bias, X* out, int64_t T, int64_t N, int64_t K) {
    int64_t blocks = N / ROWS, share = blocks / 64;  // shares small enough for many threads, and for one that is held up
    if (share < 1) share = 1;
    if (share > 32) share = 32;
#pragma omp parallel for schedule(dynamic, share)
    for (int64_t block = 0; block < blocks; block++) rows<ROWS>(w, x, scale, bias, out, T, N, K, block * ROWS);
    for (int64_t row = blocks * ROWS; row < N; row++) rows<1>(w, x, scale, bias, out, T, N, K, row);
}

template <class X>
void any_weight(const void* w, int kind, const float* x, const float* scale, const X* bias, X* out, int64_t T, int64_t N,
                int64_t K) {
    if (kind == 0) product(static_cast<const float*>(w), x, scale, bias, out, T, N, K);
    if (kind == 1) product(static_cast<const BFloat16*>(w), x, scale, bias, out, T, N, K);
    if (kind == 2) product(static_cast<const int8_t*>(w), x, scale, bias, out, T, N, K);
}

}  // namespace

// out [T, N] = x [T, K] · weight [N, K]ᵀ · scale [N] + bias [N]; scale and bias may be null, T at most MOST.
// Kinds: 0 fp32, 1 bfloat16, 2 int8. x, bias and out are of one kind, 0 or 1; wide has room for x in fp32, used for kind 1.
extern "C" void few_rows(const void* x, int x_kind, float* wide, const void* w, int w_kind, const float* scale, const void* bias,
                         void* out, int64_t T, int64_t N, int64_t K) {
    if (x_kind == 0) {
        auto narrow_x = static_cast<const float*>(x);
        any_weight(w, w_kind, narrow_x, scale, static_cast<const float*>(bias), static_cast<float*>(out), T, N, K);
    } else {
        auto narrow_x = static_cast<const BFloat16*>(x);
        for (int64_t i = 0; i < T * K; i++) wide[i] = widen(narrow_x[i]);
        any_weight(w, w_kind, wide, scale, static_cast<const BFloat16*>(bias), static_cast<BFloat16*>(out), T, N, K);
    }
}
