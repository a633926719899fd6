// What native.py compiles at first use: products of a few rows, and whole layers of a few tokens, on a CPU.

#include <algorithm>

#include "products.h"

namespace {

constexpr int64_t TOGETHER = 8;  // tokens whose attention one thread works out
constexpr int64_t ALONE = 1 << 19;  // multiplications of a layer below which threads would cost more in waiting than they take over

// e^x; x is held between -87 and 88, where it is no NaN. The polynomial is Cephes' expf.
inline Floats exp_of(Floats x) {
    x = x < -87.0f ? Floats{} - 87.0f : x;
    x = x > 88.0f ? Floats{} + 88.0f : x;
    Floats shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats sum = Floats{} + 1.9875691500e-4f;
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) sum = sum * r + c;
    sum = sum * r * r + r + 1.0f;
    return sum * Floats((Ints(shifted) - 0x4b400000 + 127) << 23);  // the bits of 2^n
}

inline void store(Floats x, float* to) { std::memcpy(to, &x, sizeof x); }
inline void store(Floats x, BFloat16* to) {
    float lanes[V];
    std::memcpy(lanes, &x, sizeof x);
    for (int i = 0; i < V; i++) narrow(lanes[i], to + i);
}

template <class X>
inline X narrowed(float x) {
    X to;
    narrow(x, &to);
    return to;
}

// One layer of a model, as model.py's Block.step has it; X is what x, the norms and the caches are, W what the weights are.
struct Layer {
    Matrix wqkv, wo, w13, w2;
    const void *attn_norm, *ffn_norm, *q_norm, *k_norm;  // the last two may be null
    int64_t heads, kv_heads, head_dim;
    float eps;
};

template <class X>
inline void norm(const X* x, const X* weight, float eps, int64_t n, X* out) {
    Floats squares = {};
    float tail = 0;
    int64_t k = 0;
    for (; k + V <= n; k += V) squares = multiplied(load(x + k), load(x + k), squares);
    for (; k < n; k++) tail += widen(x[k]) * widen(x[k]);
    float inverse = 1 / std::sqrt((sum_of(squares) + tail) / n + eps);
    for (k = 0; k < n; k++) out[k] = narrowed<X>(widen(narrowed<X>(widen(x[k]) * inverse)) * widen(weight[k]));
}

// A head of q or k: its norm, where it has one, and RoPE, to X's precision.
template <class X>
inline void turn(X* head, const void* weight, float eps, const float* cos, const float* sin, int64_t C) {
    if (weight) norm(head, static_cast<const X*>(weight), eps, C, head);
    for (int64_t c = 0; c < C / 2; c++) {
        float a = widen(head[c]), b = widen(head[c + C / 2]);
        head[c] = narrowed<X>(a * cos[c] - b * sin[c]);
        head[c + C / 2] = narrowed<X>(b * cos[c + C / 2] + a * sin[c + C / 2]);
    }
}

// sums [W · V] += n rows of values, M apart, times their weights p [n].
template <int W>
inline void mix(const float* p, const float* values, int64_t M, int64_t n, float* sums) {
    Floats total[W];
    for (int i = 0; i < W; i++) total[i] = load(sums + i * V);
    for (int64_t s = 0; s < n; s++)
        for (int i = 0; i < W; i++) total[i] = multiplied(load(values + s * M + i * V), Floats{} + p[s], total[i]);
    for (int i = 0; i < W; i++) store(total[i], sums + i * V);
}

// p [n], filled up to whole vectors, becomes e^(p - the largest). Returns the sum.
inline float exponentials(float* p, int64_t n) {
    float largest = p[0];
    for (int64_t s = 1; s < n; s++) largest = p[s] > largest ? p[s] : largest;
    Floats sums = {};
    for (int64_t s = 0; s < n; s += V) {
        Floats power = exp_of(load(p + s) - largest);
        for (int64_t i = n - s; i < V; i++) power[i] = 0;
        store(power, p + s);
        sums += power;
    }
    return sum_of(sums);
}

// out of the queries q of some rows, G heads in each, that read the same keys and values [position, C]; the rows lie q_stride and
// out_stride apart, and each reads up to its own position. Keys and values are widened a block at a time, once for all queries.
template <class X>
void attend(const X* q, int64_t q_stride, const X* k, const X* v, const int64_t* positions, int64_t rows, int64_t G, int64_t C,
            X* out, int64_t out_stride) {
    constexpr int64_t NEXT = 64;  // positions of a block
    static thread_local std::vector<float> vectors, scores, totals;
    int64_t longest = *std::max_element(positions, positions + rows) + 1, Q = rows * G;
    int64_t M = (C + V - 1) / V * V, N = (longest + V - 1) / V * V;  // filled up to whole vectors
    vectors.assign((2 * Q + NEXT) * M, 0);
    scores.resize(Q * N), totals.resize(Q);
    float *queries = vectors.data(), *sums = queries + Q * M, *block = sums + Q * M, scale = 1 / std::sqrt(float(C));
    for (int64_t i = 0; i < Q; i++)
        for (int64_t c = 0; c < C; c++) queries[i * M + c] = widen(q[i / G * q_stride + i % G * C + c]) * scale;
    auto by_blocks = [&](const X* from, auto each) {
        for (int64_t start = 0; start < longest; start += NEXT) {
            int64_t end = start + NEXT < longest ? start + NEXT : longest;
            for (int64_t s = start; s < end; s++)
                for (int64_t c = 0; c < C; c++) block[(s - start) * M + c] = widen(from[s * C + c]);
            for (int64_t i = 0; i < Q; i++) {
                int64_t n = positions[i / G] + 1 - start;
                if (n > 0) each(i, start, n < NEXT ? n : NEXT);
            }
        }
    };
    by_blocks(k, [&](int64_t i, int64_t start, int64_t n) {
        for (int64_t s = 0; s < n; s++) {
            Floats sum = {};  // of one position after another, whose chains run side by side
            for (int64_t c = 0; c < M; c += V) sum = multiplied(load(queries + i * M + c), load(block + s * M + c), sum);
            scores[i * N + start + s] = sum_of(sum);
        }
    });
    for (int64_t i = 0; i < Q; i++) totals[i] = exponentials(&scores[i * N], positions[i / G] + 1);
    by_blocks(v, [&](int64_t i, int64_t start, int64_t n) {
        float *p = &scores[i * N], *sum = sums + i * M;
        int64_t c = 0;
        for (; c + 4 * V <= M; c += 4 * V) mix<4>(p + start, block + c, M, n, sum + c);
        for (; c < M; c += V) mix<1>(p + start, block + c, M, n, sum + c);
    });
    for (int64_t i = 0; i < Q; i++)
        for (int64_t c = 0; c < C; c++) narrow(sums[i * M + c] / totals[i], out + i / G * out_stride + i % G * C + c);
}

// What a layer works in.
template <class X>
struct Desk {
    Room room;
    std::vector<X> normed, qkv, attended, part, gates, gated;
};

template <class X, class W>
void step(const Layer& l, const X* x, X* out, const float* cos, const float* sin, const int64_t* positions, X* k, X* v,
          int64_t stride, int64_t T) {
    static thread_local Desk<X> desks;
    Desk<X>& desk = desks;
    int64_t D = l.wqkv.inputs, C = l.head_dim, H = l.heads, KV = l.kv_heads, F = l.w2.inputs, G = H / KV, width = (H + 2 * KV) * C;
    desk.normed.resize(T * D), desk.qkv.resize(T * width), desk.attended.resize(T * H * C);
    desk.part.resize(T * D), desk.gates.resize(T * 2 * F), desk.gated.resize(T * F);
    int64_t widest = F > H * C ? F : H * C;
    desk.room.make(T, widest > D ? widest : D, sizeof(X) == 2 && sizeof(W) == 1);
    auto weight = [](const void* p) { return static_cast<const X*>(p); };
    int64_t longest = *std::max_element(positions, positions + T) + 1;
    int64_t work = T * (D * width + H * C * D + 3 * D * F + 2 * H * C * longest);
#pragma omp parallel if (work > ALONE)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++) norm(x + t * D, weight(l.attn_norm), l.eps, D, &desk.normed[t * D]);
        multiply<X, W>(desk.room, desk.normed.data(), l.wqkv, desk.qkv.data(), T);
#pragma omp for schedule(static) collapse(2)
        for (int64_t t = 0; t < T; t++)
            for (int64_t h = 0; h < H + 2 * KV; h++) {
                X* head = &desk.qkv[t * width + h * C];
                if (h < H + KV) turn(head, h < H ? l.q_norm : l.k_norm, l.eps, cos + t * C, sin + t * C, C);
                if (h >= H) {
                    X* cache = h < H + KV ? k + (h - H) * stride : v + (h - H - KV) * stride;
                    std::memcpy(cache + positions[t] * C, head, C * sizeof(X));
                }
            }
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t t = 0; t < T; t += TOGETHER)
            for (int64_t h = 0; h < KV; h++)
                attend(&desk.qkv[t * width + h * G * C], width, k + h * stride, v + h * stride, positions + t,
                       T - t < TOGETHER ? T - t : TOGETHER, G, C, &desk.attended[(t * H + h * G) * C], H * C);
        multiply<X, W>(desk.room, desk.attended.data(), l.wo, desk.part.data(), T);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++) {
            for (int64_t d = t * D; d < (t + 1) * D; d++) out[d] = narrowed<X>(widen(x[d]) + widen(desk.part[d]));
            norm(out + t * D, weight(l.ffn_norm), l.eps, D, &desk.normed[t * D]);
        }
        multiply<X, W>(desk.room, desk.normed.data(), l.w13, desk.gates.data(), T);
#pragma omp for schedule(static) collapse(2)
        for (int64_t t = 0; t < T; t++)
            for (int64_t f = 0; f < F; f += V) {
                const X* gate = &desk.gates[t * 2 * F + f];
                if (f + V <= F) {
                    Floats wide = load(gate);
                    store(wide / (exp_of(-wide) + 1.0f) * load(gate + F), &desk.gated[t * F + f]);
                } else {
                    for (int64_t i = 0; f + i < F; i++) {
                        float wide = widen(gate[i]);
                        desk.gated[t * F + f + i] = narrowed<X>(wide / (exp_of(Floats{} - wide)[0] + 1) * widen(gate[F + i]));
                    }
                }
            }
        multiply<X, W>(desk.room, desk.gated.data(), l.w2, desk.part.data(), T);
#pragma omp for schedule(static)
        for (int64_t d = 0; d < T * D; d++) out[d] = narrowed<X>(widen(out[d]) + widen(desk.part[d]));
    }
}

template <class X, class W>
void few(const void* x, const Matrix& m, void* out, int64_t T) {
    static thread_local Room rooms;
    Room& room = rooms;
    room.make(T, m.inputs, sizeof(X) == 2 && sizeof(W) == 1);
#pragma omp parallel
    multiply<X, W>(room, static_cast<const X*>(x), m, static_cast<X*>(out), T);
}

}  // namespace

// Kinds: 0 fp32, 1 bfloat16, 2 int8. x is of kind 0 or 1, as are out, biases, norms and caches; weights of x's kind or 2.

// out [T, N] = x [T, K] · weight [N, K]ᵀ · scale [N] + bias [N]; T at most MOST.
extern "C" void few_rows(int x_kind, int w_kind, const Matrix* m, const void* x, void* out, int64_t T) {
    auto run = x_kind == 0 ? (w_kind == 0 ? few<float, float> : few<float, int8_t>)
                           : (w_kind == 1 ? few<BFloat16, BFloat16> : few<BFloat16, int8_t>);
    run(x, *m, out, T);
}

// out [T, D] of x [T, D] at positions [T], with their cos and sin [T, C]; k and v are [K, S, C], heads ``stride`` apart.
// Returns whether all positions are below S; if not, nothing is done.
extern "C" int layer_step(int x_kind, int w_kind, const Layer* l, const void* x, void* out, const float* cos, const float* sin,
                           const int64_t* positions, void* k, void* v, int64_t stride, int64_t S, int64_t T) {
    if (T < 1) return 1;
    for (int64_t t = 0; t < T; t++)
        if (positions[t] < 0 || positions[t] >= S) return 0;
    auto run = [&](auto number, auto weight) {
        using X = decltype(number);
        step<X, decltype(weight)>(*l, static_cast<const X*>(x), static_cast<X*>(out), cos, sin, positions, static_cast<X*>(k),
                                  static_cast<X*>(v), stride, T);
    };
    if (x_kind == 0 && w_kind == 0) run(float(), float());
    if (x_kind == 0 && w_kind == 2) run(float(), int8_t());
    if (x_kind == 1 && w_kind == 1) run(BFloat16(), BFloat16());
    if (x_kind == 1 && w_kind == 2) run(BFloat16(), int8_t());
    return 1;
}
