// The loops over steps of the `batched` backend for small cells, whose time in Python goes into the
// number of operations. Buffers and their shapes are those of `forward.Saved`; letters as in cell.py.
//
// A row is a cell at work in a sample. Each row is computed by itself, so that its bits depend on
// no other row: a batch or a sequence that is cut into pieces gives the same numbers.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

namespace {

// 64 bytes of numbers, at any address.
#define LANES(T, I, DEGREE, ...)                                                     \
  template <> struct Lanes<T> {                                                      \
    typedef T V __attribute__((vector_size(64), aligned(sizeof(T)), may_alias));     \
    typedef I M __attribute__((vector_size(64), aligned(sizeof(T)), may_alias));     \
    typedef I Int;                                                                   \
    typedef int8_t Bytes __attribute__((vector_size(64 / sizeof(T)), aligned(1)));   \
    static constexpr int n = 64 / sizeof(T), degree = DEGREE;                        \
    static inline const M index = {__VA_ARGS__};                                     \
  };
template <typename T> struct Lanes;
LANES(float, int32_t, 7, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
LANES(double, int64_t, 13, 0, 1, 2, 3, 4, 5, 6, 7)

template <typename T> using V = typename Lanes<T>::V;
template <typename T> using M = typename Lanes<T>::M;
template <typename T> constexpr int L = Lanes<T>::n;

template <typename T> inline V<T>& at(T* p) { return *reinterpret_cast<V<T>*>(p); }
template <typename T> inline const V<T>& at(const T* p) { return *reinterpret_cast<const V<T>*>(p); }
template <typename T> inline int padded(int n) { return (n + L<T> - 1) / L<T> * L<T>; }

// Zeros that begin with a cache line.
template <typename T> struct Array {
  T* data;
  explicit Array(size_t size) {
    const size_t bytes = (size * sizeof(T) + 127) / 64 * 64;
    data = static_cast<T*>(std::aligned_alloc(64, bytes));
    if (!data) throw std::bad_alloc();
    std::memset(data, 0, bytes);
  }
  Array(const Array&) = delete;
  ~Array() { std::free(data); }
  operator T*() { return data; }
};

// exp(x) - less for x ≤ 0: x = m·ln 2 + r, a Taylor series in r, and 2^m by its exponent.
template <typename T> inline V<T> exp_less(V<T> x, T less) {
  constexpr bool wide = sizeof(T) == 8;
  constexpr T lowest = wide ? -708 : -87, high = wide ? T(0.693147180369123816490) : T(0.693359375),
              low = wide ? T(1.90821492927058770002e-10) : T(-2.12194440054690583e-4),
              magic = wide ? T(6755399441055744.0) : T(12582912.0);  // 1.5·2^52, 1.5·2^23
  x = x < lowest ? V<T>{} + lowest : x;
  const V<T> shifted = x * T(1.44269504088896340736) + magic, m = shifted - magic;
  const V<T> r = x - m * high - m * low;
  T factor = 1;
  for (int k = 2; k <= Lanes<T>::degree; ++k) factor /= k;
  V<T> sum = V<T>{} + factor;
  for (int k = Lanes<T>::degree; k > 1; --k) {
    factor *= k;
    sum = sum * r + factor;
  }
  using Int = typename Lanes<T>::Int;
  const M<T> bits = (M<T>)shifted << (wide ? 52 : 23);
  const V<T> power = (V<T>)(bits + (Int(wide ? 1023 : 127) << (wide ? 52 : 23)));
  return sum * r * power + (power - less);
}

template <typename T> inline V<T> sigmoid(V<T> x) {
  const V<T> e = exp_less<T>(x < 0 ? x : -x, 0), small = e / (e + 1);
  return x < 0 ? small : 1 - small;
}

template <typename T> inline V<T> tanh(V<T> x) {
  const V<T> e = exp_less<T>(2 * (x < 0 ? x : -x), 1), t = e / (e + 2);
  return x < 0 ? t : -t;
}

// out[0..n·L) += Σ v[i]·W[i·P ..) over the `size` numbers of each of the slots named. Even and odd
// numbers have sums of their own: a processor can begin several before the first one ends.
template <typename T, int n>
inline void multiply_chunk(const T* v, const int* slots, int count, int size, const T* W, long P,
                           T* out) {
  V<T> even[n], odd[n];
  for (int k = 0; k < n; ++k) even[k] = at(out + k * L<T>), odd[k] = V<T>{};
  for (int s = 0; s < count; ++s) {
    const T* from = v + slots[s] * size;
    const T* w = W + slots[s] * size * P;
    int i = 0;
    for (; i + 1 < size; i += 2, w += 2 * P)
      for (int k = 0; k < n; ++k) {
        even[k] += from[i] * at(w + k * L<T>);
        odd[k] += from[i + 1] * at(w + P + k * L<T>);
      }
    if (i < size)
      for (int k = 0; k < n; ++k) even[k] += from[i] * at(w + k * L<T>);
  }
  for (int k = 0; k < n; ++k) at(out + k * L<T>) = even[k] + odd[k];
}

template <typename T>
inline void multiply(const T* v, const int* slots, int count, int size, const T* W, int P, T* out) {
  int p = 0;
  for (; p + 8 * L<T> <= P; p += 8 * L<T>)
    multiply_chunk<T, 8>(v, slots, count, size, W + p, P, out + p);
  switch ((P - p) / L<T>) {
    case 7: multiply_chunk<T, 7>(v, slots, count, size, W + p, P, out + p); break;
    case 6: multiply_chunk<T, 6>(v, slots, count, size, W + p, P, out + p); break;
    case 5: multiply_chunk<T, 5>(v, slots, count, size, W + p, P, out + p); break;
    case 4: multiply_chunk<T, 4>(v, slots, count, size, W + p, P, out + p); break;
    case 3: multiply_chunk<T, 3>(v, slots, count, size, W + p, P, out + p); break;
    case 2: multiply_chunk<T, 2>(v, slots, count, size, W + p, P, out + p); break;
    case 1: multiply_chunk<T, 1>(v, slots, count, size, W + p, P, out + p); break;
  }
}

constexpr int ROWS = 4;

// total[k·P ..) += Σ_r H[r][k]·D[r] for ROWS rows.
template <typename T, int n>
inline void outer_chunk(const T* H, int size, const T* D, int P, T* total) {
  V<T> rows[ROWS][n];
  for (int r = 0; r < ROWS; ++r)
    for (int k = 0; k < n; ++k) rows[r][k] = at(D + r * P + k * L<T>);
  for (int i = 0; i < size; ++i, total += P)
    for (int k = 0; k < n; ++k) {
      V<T> sum = at(total + k * L<T>);
      for (int r = 0; r < ROWS; ++r) sum += H[r * size + i] * rows[r][k];
      at(total + k * L<T>) = sum;
    }
}

template <typename T> inline void outer(const T* H, int size, const T* D, int P, T* total) {
  int p = 0;
  for (; p + 4 * L<T> <= P; p += 4 * L<T>) outer_chunk<T, 4>(H, size, D + p, P, total + p);
  for (; p < P; p += L<T>) outer_chunk<T, 1>(H, size, D + p, P, total + p);
}

// Eq. (13): scores s[j·P + k] = h^j · v^k from the states (·, d) of n cells and vT (d, P). Products
// are added in one order for every pair, so that equal vectors have equal scores.
template <typename T, int n>
inline void score(const T* h, int d, const T* vT, int P, T* s) {
  for (int p = 0; p < P; p += L<T>) {
    V<T> sum[n] = {};
    for (int i = 0; i < d; ++i)
      for (int j = 0; j < n; ++j) sum[j] += h[j * d + i] * at(vT + i * P + p);
    for (int j = 0; j < n; ++j) at(s + j * P + p) = sum[j];
  }
}

template <typename T>
inline void score_all(const T* h, int N, int d, const T* vT, int P, T* s) {
  int j = 0;
  for (; j + 4 <= N; j += 4) score<T, 4>(h + j * d, d, vT, P, s + j * P);
  switch (N - j) {
    case 3: score<T, 3>(h + j * d, d, vT, P, s + j * P); break;
    case 2: score<T, 2>(h + j * d, d, vT, P, s + j * P); break;
    case 1: score<T, 1>(h + j * d, d, vT, P, s + j * P); break;
  }
}

// `selection.top_mask`: the k first of n scores; of equals the lower index, and NaN before all. To
// keep NaN first, infinity counts as the largest finite number.
// Both arrays may be read and written up to the next multiple of L.
template <typename T> inline void choose(const T* scores, int n, int k, uint8_t* out) {
  constexpr T infinite = std::numeric_limits<T>::infinity(), most = std::numeric_limits<T>::max();
  M<T> index = Lanes<T>::index;
  for (int first = 0; first < n; first += L<T>, index += L<T>) {
    M<T> place = {};
    V<T> own = at(scores + first);
    own = own == own ? (own < most ? own : V<T>{} + most) : V<T>{} + infinite;
    for (int j = 0; j < n; ++j) {
      const T s = scores[j] == scores[j] ? (scores[j] < most ? scores[j] : most) : infinite;
      place -= (own < s) | ((own == s) & (index > j));
    }
    using Bytes = typename Lanes<T>::Bytes;
    *reinterpret_cast<Bytes*>(out + first) = -__builtin_convertvector(place < k, Bytes);
  }
}

// The cells' matrices with W_q as a fifth gate and the biases as a last line: (N, S·d+1, P).
template <typename T>
void side_by_side(const T* W, const T* b, const T* W_q, bool shared, int N, int K, int d, int P,
                  T* all) {
  const int S = K + N, lines = S * d;
  for (int j = 0; j < N; ++j) {
    T* to = all + size_t(j) * (lines + 1) * P;
    for (int i = 0; i < lines; ++i)
      std::memcpy(to + size_t(i) * P, W + (size_t(j) * lines + i) * 4 * d, sizeof(T) * 4 * d);
    if (b) std::memcpy(to + size_t(lines) * P, b + size_t(j) * 4 * d, sizeof(T) * 4 * d);
    if (!W_q) continue;
    const T* from = W_q + (shared ? 0 : size_t(j) * (S - 1) * d * d);
    for (int i = 0; i < lines; ++i) {
      if (i / d == K + j) continue;  // Eq. (19): without the cell's own state
      std::memcpy(to + size_t(i) * P + 4 * d, from, sizeof(T) * d);
      from += d;
    }
  }
}

struct Shape {
  int64_t T, B, D, N, K, d, awake, K_x, K_h, shared, save;
};

template <typename T> struct Buffers {
  const T *x, *W_in, *b_in, *W, *b, *W_q, *update_bias, *noise_cells, *noise_views, *noise_peers;
  const uint8_t *live, *reset;
  T *h, *c, *y;
  uint8_t* active;
  T* V;
  uint8_t* weight;
  int64_t *pair, *counts;
  T *c_before, *gates, *tanh_c, *q, *a;
};

template <typename T> void forward(const Shape& n, const Buffers<T>& m, double scale) {
  const int B = n.B, D = n.D, N = n.N, K = n.K, d = n.d, S = K + N, lines = S * d;
  const int P = padded<T>((m.W_q ? 5 : 4) * d), P_in = padded<T>(K * d);
  const int P_x = padded<T>(K), P_h = padded<T>(N);
  const long R = B * n.awake;
  const size_t wide = padded<T>(d);
  Array<T> W(size_t(N) * (lines + 1) * P), W_in(m.W_in ? size_t(D + 1) * P_in : 0), views(P_in),
      x_T(size_t(d) * P_x), h_T(size_t(d) * P_h), s_x(size_t(N) * P_x), s_h(size_t(N) * P_h),
      relevance(P_h), work(P + L<T>), g(wide), t_c(wide), c_new(wide), h(size_t(B) * N * d);
  Array<T> masked(lines);
  Array<uint8_t> mask(P_x + P_h), finite(B);
  Array<int> slots(S + 1);
  std::memcpy(h, m.h, sizeof(T) * B * N * d);
  side_by_side(m.W, m.b, m.W_q, bool(n.shared), N, K, d, P, W.data);
  for (int i = 0; i < D && m.W_in; ++i)
    std::memcpy(W_in + size_t(i) * P_in, m.W_in + size_t(i) * K * d, sizeof(T) * K * d);
  if (m.W_in && m.b_in) std::memcpy(W_in + size_t(D) * P_in, m.b_in, sizeof(T) * K * d);
  const int all = 0;
  const bool choose_views = n.K_x < K, choose_peers = n.K_h < N - 1, choose_cells = n.awake < N;

  for (long t = 0; t < n.T; ++t) {
    const long kept = n.save ? t : 0;
    T* V_t = m.V + kept * B * lines;
    uint8_t *weight = m.weight + kept * B * N * S, *active = m.active + t * B * N;
    std::memset(weight, 1, B * N * S);
    std::memset(active, 1, B * N);
    for (long s = 0; s < B; ++s) {
      T *v = V_t + s * lines, *state = v + K * d;
      if (m.reset && m.reset[t * B + s]) {
        std::memset(h + s * N * d, 0, sizeof(T) * N * d);
        std::memset(m.c + s * N * d, 0, sizeof(T) * N * d);
      }
      const T* x = m.x + (t * B + s) * D;
      if (m.W_in) {
        std::memcpy(views, W_in + size_t(D) * P_in, sizeof(T) * P_in);
        multiply<T>(x, &all, 1, D, W_in, P_in, views);
        x = views;
      }
      std::memcpy(v, x, sizeof(T) * K * d);
      std::memcpy(state, h + s * N * d, sizeof(T) * N * d);
      T nothing = 0;
      for (int i = 0; i < lines; ++i) nothing += v[i] * 0;
      finite[s] = nothing == 0;
      if (choose_views || choose_cells) {
        for (int k = 0; k < K; ++k)
          for (int i = 0; i < d; ++i) x_T[i * P_x + k] = v[k * d + i];
        score_all<T>(state, N, d, x_T, P_x, s_x);
      }
      if (choose_peers) {
        for (int k = 0; k < N; ++k)
          for (int i = 0; i < d; ++i) h_T[i * P_h + k] = state[k * d + i];
        score_all<T>(state, N, d, h_T, P_h, s_h);
      }
      for (int j = 0; j < N; ++j) {
        T *to_views = s_x + j * P_x, *to_peers = s_h + j * P_h;
        uint8_t* chosen = weight + (s * N + j) * S;
        const long here = (t * B + s) * N + j;
        if (choose_cells) {  // Eq. (14)
          T sum = 0;
          for (int k = 0; k < K; ++k) sum += to_views[k];
          relevance[j] = m.noise_cells ? m.noise_cells[here] : sum;
        }
        if (choose_views) {  // Eq. (15)
          if (m.noise_views) std::memcpy(to_views, m.noise_views + here * K, sizeof(T) * K);
          choose<T>(to_views, K, int(n.K_x), mask);
          std::memcpy(chosen, mask, K);
        }
        if (choose_peers) {  // Eq. (16)
          if (m.noise_peers) std::memcpy(to_peers, m.noise_peers + here * N, sizeof(T) * N);
          const T lowest = std::numeric_limits<float>::lowest();
          for (int i = 0; i < N; ++i) to_peers[i] = to_peers[i] < lowest ? lowest : to_peers[i];
          to_peers[j] = -std::numeric_limits<T>::infinity();
          choose<T>(to_peers, N, int(n.K_h), mask);
          std::memcpy(chosen + K, mask, N);
          chosen[K + j] = 1;
        }
      }
      if (choose_cells) {
        choose<T>(relevance, N, int(n.awake), mask);
        std::memcpy(active + s * N, mask, N);
      }
    }

    T* y = m.y + t * B * N * d;
    std::memcpy(y, h, sizeof(T) * B * N * d);
    long row = 0;
    for (int j = 0; j < N; ++j) {
      const T* W_j = W + size_t(j) * (lines + 1) * P;
      const long before = row;
      for (long s = 0; s < B; ++s) {
        if (!active[s * N + j]) continue;
        const T *v = V_t + s * lines, *old = v + (K + j) * d;
        T *c = m.c + (s * N + j) * d, *gates = m.gates + (kept * R + row) * 4 * d;
        // What a cell leaves out is not multiplied, but zero times what is not finite is not zero.
        const uint8_t* chosen = weight + (s * N + j) * S;
        int count = 0;
        for (int k = 0; k < S; ++k) {
          slots[count] = k;
          count += finite[s] ? chosen[k] : 1;
        }
        if (!finite[s]) {
          for (int i = 0; i < lines; ++i) masked[i] = v[i] * chosen[i / d];
          v = masked;
        }
        std::memcpy(work, W_j + size_t(lines) * P, sizeof(T) * P);
        multiply<T>(v, slots, count, d, W_j, P, work);
        // Eqs. (1)-(6)
        for (int i = 0; i < d; i += L<T>) at(&g[i]) = tanh<T>(at(&work[3 * d + i]));
        T* q = m.q + (kept * R + row) * d;
        if (m.W_q) std::memcpy(q, &work[4 * d], sizeof(T) * d);
        for (int i = 0; i < 3 * d; i += L<T>) at(&work[i]) = sigmoid<T>(at(&work[i]));
        std::memcpy(gates, work, sizeof(T) * 3 * d);
        std::memcpy(gates + 3 * d, g, sizeof(T) * d);
        std::memcpy(m.c_before + (kept * R + row) * d, c, sizeof(T) * d);
        const T *f = gates, *in = gates + d, *o = gates + 2 * d;
        for (int i = 0; i < d; ++i) c_new[i] = f[i] * c[i] + in[i] * g[i];
        for (int i = 0; i < d; i += L<T>) at(&t_c[i]) = tanh<T>(at(&c_new[i]));
        std::memcpy(m.tanh_c + (kept * R + row) * d, t_c, sizeof(T) * d);
        T a = 1;
        if (m.W_q) {  // Eqs. (20)-(21): a softmax of two logits is a sigmoid of their difference
          T z = 0;
          for (int i = 0; i < d; ++i) z += (o[i] * t_c[i] - old[i]) * q[i];
          z = T(scale) * z + (m.update_bias ? m.update_bias[j] : 0);
          a = m.a[kept * R + row] = sigmoid<T>(V<T>{} + z)[0];
        }
        if (!m.live || m.live[t * B + s]) {
          T* new_h = y + (s * N + j) * d;
          for (int i = 0; i < d; ++i)
            new_h[i] = m.W_q ? old[i] + (o[i] * t_c[i] - old[i]) * a : o[i] * t_c[i];
          std::memcpy(c, c_new, sizeof(T) * d);
        }
        m.pair[kept * R + row++] = s * N + j;
      }
      if (n.awake < N) m.counts[kept * N + j] = row - before;
    }
    if (m.live)
      for (long i = 0; i < B * N; ++i) active[i] &= m.live[t * B + i / N];
    std::memcpy(h, y, sizeof(T) * B * N * d);
  }
}

template <typename T> struct Gradients {
  const T *dy, *W, *W_q;
  const uint8_t *active, *reset, *weight;
  const T* V;
  const int64_t* pair;
  const T *c_before, *gates, *tanh_c, *q, *a;
  T *dh, *dc, *dV_x, *dW, *d_bias;
};

template <typename T> void backward(const Shape& n, const Gradients<T>& m, double scale) {
  const int B = n.B, N = n.N, K = n.K, d = n.d, S = K + N, lines = S * d, G = (m.W_q ? 5 : 4) * d;
  const int P = padded<T>(G), Q = padded<T>(lines);
  const long R = B * n.awake;
  const int all = 0;
  Array<T> W(size_t(N) * G * Q), wide(size_t(N) * (lines + 1) * P), D(size_t(R) * P), dH(Q),
      H_wait(size_t(N) * ROWS * (lines + 1)), D_wait(size_t(N) * ROWS * P);
  Array<int> waiting(N);
  side_by_side<T>(m.W, nullptr, m.W_q, bool(n.shared), N, K, d, P, wide);
  for (int j = 0; j < N; ++j)  // W (N, 5·d, S·d) is the transposed
    for (int i = 0; i < lines; ++i)
      for (int k = 0; k < G; ++k)
        W[(size_t(j) * G + k) * Q + i] = wide[(size_t(j) * (lines + 1) + i) * P + k];
  auto add_up = [&](int j) {
    outer<T>(&H_wait[size_t(j) * ROWS * (lines + 1)], lines + 1, &D_wait[size_t(j) * ROWS * P], P,
          m.dW + size_t(j) * (lines + 1) * P);
    waiting[j] = 0;
  };

  for (long t = n.T - 1; t >= 0; --t) {
    const T *dy = m.dy + t * B * N * d, *V_t = m.V + t * B * lines;
    for (long i = 0; i < B * N * d; ++i) m.dh[i] += dy[i];
    for (long row = 0; row < R; ++row) {
      const long at_row = t * R + row, pair = m.pair[at_row], s = pair / N, j = pair % N;
      T *to = &D[row * P], *dh = m.dh + pair * d, *dc = m.dc + pair * d;
      if (!m.active[t * B * N + pair]) {
        std::memset(to, 0, sizeof(T) * P);
        continue;
      }
      const T *f = m.gates + at_row * 4 * d, *in = f + d, *o = in + d, *g = o + d;
      const T *t_c = m.tanh_c + at_row * d, *c = m.c_before + at_row * d;
      const T *q = m.q + at_row * d, *old = V_t + s * lines + (K + j) * d;
      T a = 1, dz = 0;
      if (m.W_q) {
        a = m.a[at_row];
        for (int i = 0; i < d; ++i) dz += dh[i] * (o[i] * t_c[i] - old[i]);
        dz *= a * (1 - a);
        if (m.d_bias) m.d_bias[j] += dz;
        dz *= T(scale);
      }
      for (int i = 0; i < d; ++i) {
        T tilde = dh[i];
        if (m.W_q) {
          to[4 * d + i] = (o[i] * t_c[i] - old[i]) * dz;
          tilde = dh[i] * a + dz * q[i];
        }
        const T c_new = dc[i] + tilde * o[i] * (1 - t_c[i] * t_c[i]);
        to[i] = c_new * c[i] * f[i] * (1 - f[i]);
        to[d + i] = c_new * g[i] * in[i] * (1 - in[i]);
        to[2 * d + i] = tilde * t_c[i] * o[i] * (1 - o[i]);
        to[3 * d + i] = c_new * in[i] * (1 - g[i] * g[i]);
        dc[i] = c_new * f[i];
        dh[i] = m.W_q ? dh[i] - tilde : 0;
      }
    }
    for (long row = 0; row < R; ++row) {
      const long pair = m.pair[t * R + row], s = pair / N, j = pair % N;
      if (!m.active[t * B * N + pair]) continue;
      const uint8_t* chosen = m.weight + (t * B * N + pair) * S;
      std::memset(dH, 0, sizeof(T) * Q);
      multiply<T>(&D[row * P], &all, 1, G, &W[size_t(j) * G * Q], Q, dH);
      for (int k = 0; k < S; ++k) {
        if (!chosen[k] || (k < K && !m.dV_x)) continue;
        T* to = k < K ? m.dV_x + ((t * B + s) * K + k) * d : m.dh + (s * N + k - K) * d;
        for (int i = 0; i < d; ++i) to[i] += dH[k * d + i];
      }
      if (!m.dW) continue;
      const size_t place = size_t(j) * ROWS + waiting[j];
      T* H = &H_wait[place * (lines + 1)];
      for (int k = 0; k < S; ++k)
        for (int i = 0; i < d; ++i)
          H[k * d + i] = chosen[k] ? V_t[s * lines + k * d + i] : 0;
      H[lines] = 1;
      std::memcpy(&D_wait[place * P], &D[row * P], sizeof(T) * P);
      if (++waiting[j] == ROWS) add_up(j);
    }
    for (long s = 0; s < B && m.reset; ++s)
      if (m.reset[t * B + s]) {
        std::memset(m.dh + s * N * d, 0, sizeof(T) * N * d);
        std::memset(m.dc + s * N * d, 0, sizeof(T) * N * d);
      }
  }
  for (int j = 0; j < N; ++j)
    if (waiting[j]) {
      for (int r = waiting[j]; r < ROWS; ++r)
        std::memset(&D_wait[(size_t(j) * ROWS + r) * P], 0, sizeof(T) * P);
      for (int r = waiting[j]; r < ROWS; ++r)
        std::memset(&H_wait[(size_t(j) * ROWS + r) * (lines + 1)], 0, sizeof(T) * (lines + 1));
      add_up(j);
    }
}

}  // namespace

// 0, or 1 where there is no memory for the buffers.
template <typename F> int run(F pass) {
  try {
    pass();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

extern "C" {
int forward_float(const Shape* n, const Buffers<float>* m, double scale) {
  return run([=] { forward(*n, *m, scale); });
}
int forward_double(const Shape* n, const Buffers<double>* m, double scale) {
  return run([=] { forward(*n, *m, scale); });
}
int backward_float(const Shape* n, const Gradients<float>* m, double scale) {
  return run([=] { backward(*n, *m, scale); });
}
int backward_double(const Shape* n, const Gradients<double>* m, double scale) {
  return run([=] { backward(*n, *m, scale); });
}
}
