// Products of a few rows with a weight matrix on a CPU.
//
// Each output is one dot product along the inputs, whose terms are added in an order that depends on the number of inputs
// alone: not on how many rows are multiplied together, nor on the number of threads. So a row's product is the same to the bit
// whether the row is alone or one of a block.
//
// Products are fp32, but where x is bfloat16 and the weight int8: there x is written in steps of 16 bits, one step for each PIECE
// inputs (32,767 of them reach the largest, so that it loses less than bfloat16 has lost already), and products are whole numbers,
// of which a register holds twice as many.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int V = 16, GROUP = 6;  // floats in a register; rows of x that are multiplied at once, as registers allow
#else
constexpr int V = 8, GROUP = 3;
#endif
constexpr int CHAINS = 2;    // vectors that sums are kept in
constexpr int ROWS = 4;      // of the weight, multiplied at once
constexpr int BLOCK = 512;   // inputs widened at a time, whole turns of the chains
constexpr int NEAR = 4096;   // fp32 inputs beyond which x leaves the first-level cache, and is better read for several rows
constexpr int AHEAD = 512;   // bytes
constexpr int STRIDE = BLOCK + 16;  // of widened rows: at a power of two they would take each other's place in the cache
constexpr int FEW = 3;       // rows of x for which a weight is widened in registers
constexpr int MOST = 64;     // rows of x
constexpr int PIECE = 512;   // inputs that share a step of x; sums of so many products stay below 2^31

typedef float Floats __attribute__((vector_size(4 * V), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * V), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * V), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * V), aligned(2)));
typedef int8_t Bytes __attribute__((vector_size(V), aligned(1)));
typedef int16_t Shorts __attribute__((vector_size(4 * V), aligned(2)));
typedef int8_t ManyBytes __attribute__((vector_size(2 * V), aligned(1)));

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

// Compilers would load x anew at each use.
template <class X>
inline void in_register(X& x) {
#ifdef __AVX__
    asm("" : "+v"(x));
#endif
}

// Halves are added to each other until one number is left.
inline float sum_of(Floats x) {
#ifdef __AVX__
#ifdef __AVX512F__
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
#else
    __m256 eight = x;
#endif
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
    float lanes[V];
    std::memcpy(lanes, &x, sizeof x);
    for (int half = V / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
#endif
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
            for (int c = 0; c < C; c++) in_register(columns[c] = load(x + c * x_stride + k));
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

inline Shorts load(const int16_t* p) { return *reinterpret_cast<const Shorts*>(p); }
inline Shorts spread(const int8_t* p) {
#if defined(__AVX512BW__)
    return Shorts(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return Shorts(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    return __builtin_convertvector(*reinterpret_cast<const ManyBytes*>(p), Shorts);
#endif
}

// Sums of the products of neighbours.
inline Ints pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
    return Ints(_mm512_madd_epi16(__m512i(a), __m512i(b)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return Ints(_mm256_madd_epi16(__m256i(a), __m256i(b)));
#else
    Ints sums;
    for (int i = 0; i < V; i++) sums[i] = int32_t(a[2 * i]) * b[2 * i] + int32_t(a[2 * i + 1]) * b[2 * i + 1];
    return sums;
#endif
}

// x [T, K] in steps: PIECE inputs of every row, then the next PIECE, the last filled up with zeros.
struct Steps {
    std::vector<int16_t> q;   // [pieces, T, PIECE]
    std::vector<float> step;  // [pieces, T]
    int64_t T;

    const int16_t* at(int64_t piece, int64_t t) const { return q.data() + (piece * T + t) * PIECE; }
    float step_at(int64_t piece, int64_t t) const { return step[piece * T + t]; }

    void make_room(int64_t rows, int64_t K) {
        T = rows;
        q.resize((K + PIECE - 1) / PIECE * T * PIECE);
        step.resize((K + PIECE - 1) / PIECE * T);
    }

    void fill(const BFloat16* x, int64_t K) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < (K + PIECE - 1) / PIECE * T; i++) {
            int64_t start = i / T * PIECE, n = K - start < PIECE ? K - start : PIECE;
            step[i] = fill_piece(x + i % T * K + start, n, q.data() + i * PIECE);
        }
    }

    static float fill_piece(const BFloat16* x, int64_t n, int16_t* to) {
        float wide[PIECE] = {};
        for (int64_t k = 0; k < n; k++) wide[k] = widen(x[k]);
        Floats largest = {}, odd = {};
        for (int k = 0; k < PIECE; k += V) {
            Floats now = load(wide + k), size = now < 0 ? -now : now;
            largest = size > largest ? size : largest;
            odd += now * 0;  // becomes NaN if there is an infinity or a NaN, which must show in every sum
        }
        float most = 0;
        for (int i = 0; i < V; i++) most = largest[i] > most ? largest[i] : most;
        float inverse = most > 1e-30f ? 32767 / most : 0;
        for (int k = 0; k < PIECE; k++) {
            float nearest = wide[k] * inverse + 12582912.0f;  // 1.5 * 2^23: what is left of a fraction is rounded off
            int32_t bits;
            std::memcpy(&bits, &nearest, 4);
            to[k] = int16_t(bits - 0x4b400000);
        }
        return most / 32767 + sum_of(odd);
    }
};

// Inputs behind the last whole vector.
inline int32_t tail_of(const int8_t* w, const int16_t* x, int64_t n) {
    int32_t sum = 0;
    for (int64_t k = n / (2 * V) * (2 * V); k < n; k++) sum += w[k] * x[k];
    return sum;
}

// As few_dots.
template <int R, int C>
inline void few_dots(const int8_t* w, const Steps& x, int64_t K, float (*sums)[MOST]) {
    Floats total[R][C] = {};
    float tail[R][C] = {};
    auto add = [&](int64_t piece, int64_t n) {
        const int8_t* here = w + piece * PIECE;
        const int16_t* columns = x.at(piece, 0);
        Ints sum[R][C][2] = {};
        auto step = [&](int64_t k, int u) {
            for (int r = 0; r < R; r++) {
                Shorts wide = spread(here + r * K + k);
                for (int c = 0; c < C; c++) sum[r][c][u] += pairs(wide, load(columns + c * PIECE + k));
            }
        };
        int64_t k = 0;
        for (; k + 4 * V <= n; k += 4 * V) {
            for (int r = 0; R > 1 && r < R; r++) __builtin_prefetch(here + r * K + k + AHEAD);
            step(k, 0), step(k + 2 * V, 1);
        }
        if (k + 2 * V <= n) step(k, 0);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) {
                float step = x.step_at(piece, c);
                Floats whole = __builtin_convertvector(sum[r][c][0] + sum[r][c][1], Floats);
                total[r][c] = multiplied(whole, Floats{} + step, total[r][c]);
                if (n % (2 * V)) tail[r][c] = float(tail_of(here + r * K, columns + c * PIECE, n)) * step;
            }
    };
    for (int64_t piece = 0; piece < K / PIECE; piece++) add(piece, PIECE);
    if (K % PIECE) add(K / PIECE, K % PIECE);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sums[r][c] = sum_of(total[r][c]) + tail[r][c];
}

// totals[r][c] += row r of the widened weight · row c of x, over n inputs; whole vectors alone.
template <int R, int C>
inline void tile(const int16_t (*w)[PIECE], const int16_t* x, const float* step, int64_t n, Floats (*totals)[MOST]) {
    Ints sum[R][C] = {};
    for (int64_t k = 0; k + 2 * V <= n; k += 2 * V) {
        Shorts columns[C];
        for (int c = 0; c < C; c++) in_register(columns[c] = load(x + c * PIECE + k));
        for (int r = 0; r < R; r++) {
            Shorts row = load(&w[r][k]);
            in_register(row);
            for (int c = 0; c < C; c++) sum[r][c] += pairs(row, columns[c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            totals[r][c] = multiplied(__builtin_convertvector(sum[r][c], Floats), Floats{} + step[c], totals[r][c]);
}

// As block_dots.
template <int R>
inline void block_dots(const int8_t* w, const Steps& x, int64_t T, int64_t K, float (*sums)[MOST]) {
    int16_t wide[R][PIECE];
    Floats totals[R][MOST];
    float tails[R][MOST] = {};
    for (int r = 0; r < R; r++) std::memset(totals[r], 0, T * sizeof(Floats));
    for (int64_t start = 0, piece = 0; start < K; start += PIECE, piece++) {
        int64_t n = K - start < PIECE ? K - start : PIECE;
        for (int r = 0; r < R; r++)
            for (int64_t k = 0; k + 2 * V <= n; k += 2 * V) {
                *reinterpret_cast<Shorts*>(&wide[r][k]) = spread(w + r * K + start + k);
                __builtin_prefetch(w + (r + R) * K + start + k);
            }
        auto at = [&](int64_t t) { return reinterpret_cast<Floats (*)[MOST]>(&totals[0][t]); };
        const float* step = &x.step[piece * T];
        int64_t t = 0;
        for (; t + 2 <= T; t += 2) tile<R, 2>(wide, x.at(piece, t), step + t, n, at(t));
        if (t < T) tile<R, 1>(wide, x.at(piece, t), step + t, n, at(t));
        for (int r = 0; n % (2 * V) && r < R; r++)
            for (t = 0; t < T; t++) tails[r][t] += float(tail_of(w + r * K + start, x.at(piece, t), n)) * step[t];
    }
    for (int r = 0; r < R; r++)
        for (int64_t t = 0; t < T; t++) sums[r][t] = sum_of(totals[r][t]) + tails[r][t];
}

template <int R, class W>
void dots(const W* w, const float* x, int64_t T, int64_t K, float (*sums)[MOST]) {
    if (T > FEW) return block_dots<R>(w, x, T, K, sums);
    if (T == 1 && K > NEAR) return few_dots<R, 1>(w, x, K, sums);
    for (int r = 0; r < R; r++) {
        if (T == 1) few_dots<1, 1>(w + r * K, x, K, sums + r);
        if (T == 2) few_dots<1, 2>(w + r * K, x, K, sums + r);
        if (T == 3) few_dots<1, 3>(w + r * K, x, K, sums + r);
    }
}

template <int R>
void dots(const int8_t* w, const Steps& x, int64_t T, int64_t K, float (*sums)[MOST]) {
    if (T > FEW) return block_dots<R>(w, x, T, K, sums);
    if (T == 1 && K > 2 * NEAR) return few_dots<R, 1>(w, x, K, sums);
    for (int r = 0; r < R; r++) {
        if (T == 1) few_dots<1, 1>(w + r * K, x, K, sums + r);
        if (T == 2) few_dots<1, 2>(w + r * K, x, K, sums + r);
        if (T == 3) few_dots<1, 3>(w + r * K, x, K, sums + r);
    }
}

template <int R, class W, class In, class X>
void rows(const W* w, const In& x, const float* scale, const X* bias, X* out, int64_t T, int64_t N, int64_t K, int64_t first) {
    float sums[R][MOST];
    dots<R>(w + first * K, x, T, K, sums);
    for (int r = 0; r < R; r++)
        for (int64_t t = 0; t < T; t++) {
            float sum = scale ? sums[r][t] * scale[first + r] : sums[r][t];
            narrow(bias ? sum + widen(bias[first + r]) : sum, out + t * N + first + r);
        }
}

// The weight of a product: [outputs, inputs]; scale fp32 [outputs] and bias [outputs] may be null.
struct Matrix {
    const void *weight, *bias;
    const float* scale;
    int64_t outputs, inputs;
};

// Inputs of products in the form that they are multiplied in.
struct Room {
    std::vector<float> wide;
    Steps steps;

    void make(int64_t T, int64_t K, bool in_steps) {
        if (in_steps)
            steps.make_room(T, K);
        else
            wide.resize(T * K);
    }
};

// What follows is done by all threads of a team together, each of which does its share.

template <class W, class In, class X>
void product(const W* w, const In& x, const Matrix& m, X* out, int64_t T) {
    int64_t N = m.outputs, K = m.inputs;
    auto bias = static_cast<const X*>(m.bias);
    // shares small enough for a thread that is held up, and large enough for what processors foresee
    int64_t blocks = N / ROWS, share = blocks / (16 * omp_get_num_threads());
    if (share < 1) share = 1;
    if (share > 64) share = 64;
#pragma omp for schedule(dynamic, share) nowait
    for (int64_t block = 0; block < blocks; block++) rows<ROWS>(w, x, m.scale, bias, out, T, N, K, block * ROWS);
#pragma omp for schedule(static)
    for (int64_t row = blocks * ROWS; row < N; row++) rows<1>(w, x, m.scale, bias, out, T, N, K, row);
}

template <class X, class W>
void multiply(Room& room, const X* x, const Matrix& m, X* out, int64_t T) {
    auto w = static_cast<const W*>(m.weight);
    if constexpr (sizeof(X) == 2 && sizeof(W) == 1) {
        room.steps.fill(x, m.inputs);
        product(w, room.steps, m, out, T);
    } else if constexpr (sizeof(X) == 2) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < T * m.inputs; i++) room.wide[i] = widen(x[i]);
        product(w, static_cast<const float*>(room.wide.data()), m, out, T);
    } else {
        product(w, x, m, out, T);
    }
}

}  // namespace
