// The loops over steps of the `batched` backend. In Python a small cell's time goes into the number
// of operations, and a large cell's products also multiply what was not chosen. Buffers and their
// shapes are those of `forward.Saved`; letters as in cell.py.
//
// A row is a cell at work in a sample. Each row is computed by itself, so that its bits depend on
// no other row: a batch or a sequence that is cut into pieces gives the same numbers.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>

namespace {

// The numbers that the processor computes at once, at any address, and how many such vectors and rows
// of a product it keeps in its registers. Wider vectors than it has would be many times slower.
#if defined(__AVX512F__)
constexpr int BYTES = 64, WIDE = 4, TALL = 6;
#elif defined(__AVX__)
constexpr int BYTES = 32, WIDE = 2, TALL = 6;
#else
constexpr int BYTES = 16, WIDE = 2, TALL = 4;
#endif
constexpr int LINE = 64;  // of the cache; rows of matrices are padded to it

template <typename T> struct Lanes {
  static constexpr bool wide = sizeof(T) == 8;
  static constexpr int n = BYTES / sizeof(T), degree = wide ? 13 : 7;
  typedef std::conditional_t<wide, int64_t, int32_t> Int;
  typedef T V __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
  typedef Int M __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
  typedef int8_t Bytes __attribute__((vector_size(n), aligned(1)));
  struct __attribute__((packed, may_alias)) Anywhere {
    V v;
  };
};

template <typename T> using V = typename Lanes<T>::V;
template <typename T> using M = typename Lanes<T>::M;
template <typename T> constexpr int L = Lanes<T>::n;

// The vector at an address, as at(p).v: through a reference to V<T> itself clang would take it for one
// that is aligned to its size.
template <typename T> inline auto& at(T* p) {
  typedef typename Lanes<std::remove_const_t<T>>::Anywhere Anywhere;
  return *reinterpret_cast<std::conditional_t<std::is_const_v<T>, const Anywhere, Anywhere>*>(p);
}
template <typename T> inline int padded(int n) {
  constexpr int line = LINE / sizeof(T);
  return (n + line - 1) / line * line;
}

// Memory that begins with a cache line.
template <typename T> struct Memory {
  T* data;
  explicit Memory(size_t size) {
    data = static_cast<T*>(std::aligned_alloc(LINE, bytes(size)));
    if (!data) throw std::bad_alloc();
  }
  Memory(const Memory&) = delete;
  ~Memory() { std::free(data); }
  operator T*() { return data; }
  static size_t bytes(size_t size) { return (size * sizeof(T) + 2 * LINE - 1) / LINE * LINE; }
};

// The same, of zeros.
template <typename T> struct Array : Memory<T> {
  explicit Array(size_t size) : Memory<T>(size) {
    std::memset(this->data, 0, this->bytes(size));
  }
};

// exp(x) - less for x ≤ 0: x = m·ln 2 + r, a Taylor series in r, and 2^m by its exponent.
template <typename T> inline V<T> exp_less(V<T> x, V<T> less) {
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

// sigmoid(x) in lanes where kind is 0, tanh(x) where it is 1, in one computation for both.
template <typename T> inline V<T> squash(V<T> x, V<T> kind) {
  const V<T> below = (V<T>)((M<T>)x | (M<T>)(-V<T>{}));  // -|x|
  const V<T> e = exp_less<T>((1 + kind) * below, kind), small = e / (e + 1 + kind);
  return x < 0 ? small : 1 - kind - small;
}

#define INLINED __attribute__((always_inline))
template <int n> using Size = std::integral_constant<int, n>;

// Calls f(how many, first) for `count` things in even parts of up to `most`, of sizes that the
// compiler knows.
template <int most, typename F> inline INLINED void in_parts(int count, F f) {
  for (int i = 0, size; i < count; i += size) {
    const int left = count - i, parts = (left + most - 1) / most;
    size = parts == 1 ? left : (left + parts - 1) / parts;  // most often no division
    switch (size) {
      case 6: if constexpr (most >= 6) f(Size<6>(), i); break;
      case 5: if constexpr (most >= 5) f(Size<5>(), i); break;
      case 4: if constexpr (most >= 4) f(Size<4>(), i); break;
      case 3: if constexpr (most >= 3) f(Size<3>(), i); break;
      case 2: f(Size<2>(), i); break;
      case 1: f(Size<1>(), i); break;
    }
  }
}

constexpr int ROWS = 64;  // samples that are computed together

// For every set of eight things, those in it: a byte each, the lowest first.
struct Sets {
  uint64_t members[256] = {};
  constexpr Sets() {
    for (int set = 0; set < 256; ++set)
      for (uint64_t i = 0, n = 0; i < 8; ++i)
        if (set >> i & 1) members[set] |= i << 8 * n++;
  }
};
constexpr Sets sets;

// Flags are bytes of 0 or 1; a line of them has one for each sample, and is padded.
inline size_t flags_of(int B) { return (B + 15) / 16 * 16; }

// Writes which of `samples` have both flags, and says how many.
inline int list(const uint8_t* flags, const uint8_t* others, int samples, uint8_t* out) {
  int count = 0;
  for (uint64_t i = 0, some, more; int(i) < samples; i += 8) {
    std::memcpy(&some, flags + i, 8);
    std::memcpy(&more, others + i, 8);
    const uint64_t set = (some & more) * 0x0102040810204080 >> 56;  // a bit from each byte
    some = sets.members[set] + i * 0x0101010101010101;
    std::memcpy(out + count, &some, 8);
    count += __builtin_popcount(set);
  }
  return count;
}

// Matrices of `lines` × P, all of one size. The columns of a tile lie together, so that a tile stays
// in the cache while all rows are multiplied.
template <typename T> struct Matrices {
  const long lines;
  const int P;
  Memory<T> data;
  Matrices(int count, long lines, int P) : lines(lines), P(P), data(size_t(count) * lines * P) {}
  T* operator[](int j) { return data + size_t(j) * lines * P; }

  // Copies line i of matrix j.
  void set(int j, long i, const T* line) {
    in_parts<WIDE>(P / L<T>, [=](auto width, int chunk) INLINED {
      T* to = (*this)[j] + (chunk * lines + i * width) * L<T>;
      for (int k = 0; k < width; ++k) at(to + k * L<T>).v = at(line + (chunk + k) * L<T>).v;
    });
  }
};

// Rows of a buffer, which begin `stride` apart.
template <typename T> struct Rows {
  T* data;
  long stride;
  T* operator[](long r) const { return data + r * stride; }
};

// out[r] += Σ_i v[r][i]·W[(first + i)·P ..) for the `count` rows r named, over `size` lines of matrix
// j; with `begin`, out[r] counts as `begin`. With `starts` over as many lines in each of `slots`: the
// numbers of slot n begin at v.data[starts[n·ROWS + r]]. Every row's products are added in one order,
// however many rows there are.
template <typename T>
inline void multiply(Rows<const T> v, const uint8_t* named, int count, Matrices<T>& W, int j,
                     int first, int size, const T* begin, Rows<T> out, int slots = 1,
                     const int32_t* starts = nullptr) {
  in_parts<WIDE>(W.P / L<T>, [=, &W](auto width_, int chunk) INLINED {
    constexpr int width = decltype(width_)::value;
    const T* tile = W[j] + chunk * L<T> * W.lines + first * width * L<T>;
    in_parts<TALL>(count, [=](auto rows_, int r) INLINED {
      constexpr int rows = decltype(rows_)::value;
      V<T> sum[rows][width];
      T* to[rows];
      for (int a = 0; a < rows; ++a) {
        to[a] = out[named[r + a]] + chunk * L<T>;
        const T* from = begin ? begin + chunk * L<T> : to[a];
        for (int k = 0; k < width; ++k) sum[a][k] = at(from + k * L<T>).v;
      }
      const T* w = tile;
      for (long n = 0; n < slots; ++n) {
        const T* x[rows];
        for (int a = 0; a < rows; ++a)
          x[a] = starts ? v.data + starts[n * ROWS + named[r + a]] : v[named[r + a]];
        for (long i = 0; i < size; ++i, w += width * L<T>)
          for (int a = 0; a < rows; ++a)
            for (int k = 0; k < width; ++k) sum[a][k] += x[a][i] * at(w + k * L<T>).v;
      }
      for (int a = 0; a < rows; ++a)
        for (int k = 0; k < width; ++k) at(to[a] + k * L<T>).v = sum[a][k];
    });
  });
}

// total[i·P ..) += Σ_r v[r·stride + i]·D[r·P ..) over the `count` rows r named.
template <typename T>
inline void add_outer(const T* v, long stride, const T* D, const uint8_t* named, int count, int size,
                      int P, T* total) {
  in_parts<TALL>(size, [=](auto lines_, int i) INLINED {
    constexpr int lines = decltype(lines_)::value;
    in_parts<WIDE>(P / L<T>, [&](auto width_, int chunk) INLINED {
      constexpr int width = decltype(width_)::value;
      T* to = total + i * P + chunk * L<T>;
      V<T> sum[lines][width];
      for (int a = 0; a < lines; ++a)
        for (int k = 0; k < width; ++k) sum[a][k] = at(to + a * P + k * L<T>).v;
      for (int r = 0; r < count; ++r) {
        const T *x = v + named[r] * stride + i, *D_r = D + named[r] * long(P) + chunk * L<T>;
        for (int a = 0; a < lines; ++a)
          for (int k = 0; k < width; ++k) sum[a][k] += x[a] * at(D_r + k * L<T>).v;
      }
      for (int a = 0; a < lines; ++a)
        for (int k = 0; k < width; ++k) at(to + a * P + k * L<T>).v = sum[a][k];
    });
  });
}

// Which lanes of a vector that begins with number i are among the first n.
template <typename T> inline M<T> within(int i, int n) {
  M<T> index;
  for (int lane = 0; lane < L<T>; ++lane) index[lane] = lane;
  return index < n - i;
}

// The sum of n numbers: of those in the first and in the second half, and so on.
template <typename T, int n> inline T total(const T* parts) {
  typedef T Half __attribute__((vector_size(n / 2 * sizeof(T)), aligned(sizeof(T)), may_alias));
  const Half *halves = reinterpret_cast<const Half*>(parts), sum = halves[0] + halves[1];
  if constexpr (n > 2) return total<T, n / 2>(reinterpret_cast<const T*>(&sum));
  else return sum[0];
}

template <typename T> inline T total(V<T> v) {
  return total<T, L<T>>(reinterpret_cast<const T*>(&v));
}

// Swaps the lanes of a that have `bit` in their number for those of b that have not.
template <typename T, int bit, int... i>
inline void exchange(V<T>& a, V<T>& b, std::integer_sequence<int, i...>) {
#ifdef __clang__
  const V<T> low = __builtin_shufflevector(a, b, (i & bit ? L<T> + i - bit : i)...);
  b = __builtin_shufflevector(a, b, (i & bit ? L<T> + i : i + bit)...);
#else
  const V<T> low = __builtin_shuffle(a, b, M<T>{(i & bit ? L<T> + i - bit : i)...});
  b = __builtin_shuffle(a, b, M<T>{(i & bit ? L<T> + i : i + bit)...});
#endif
  a = low;
}

template <typename T, int bit = 1> inline INLINED void transpose(V<T>* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < L<T>; ++i)
    if (!(i & bit))
      exchange<T, bit>(rows[i], rows[i + bit], std::make_integer_sequence<int, L<T>>());
  if constexpr (2 * bit < L<T>) transpose<T, 2 * bit>(rows);
}

// `selection.top_mask` of L samples at once, a lane each: the k first of the n scores s[i·L ..). Of
// equals the lower index, and NaN before all; to keep it first, infinity counts as the largest
// finite number. Whether i is chosen goes to out[i·stride ..). `place` is for n·L integers.
template <typename T>
inline void choose(T* s, int n, int k, M<T>* place, uint8_t* out, size_t stride) {
  constexpr T infinite = std::numeric_limits<T>::infinity(), most = std::numeric_limits<T>::max();
  for (int i = 0; i < n; ++i) {
    const V<T> v = at(s + i * L<T>).v;
    at(s + i * L<T>).v = v == v ? (v < most ? v : V<T>{} + most) : V<T>{} + infinite;
    place[i] = M<T>{} + i;  // as if all before it were ahead
  }
  using Bytes = typename Lanes<T>::Bytes;
  for (int i = 0; i < n; ++i) {
    const V<T> own = at(s + i * L<T>).v;
    M<T> mine = place[i];
    for (int j = i + 1; j < n; ++j) {
      const M<T> behind = at(s + j * L<T>).v > own;  // -1 where j is ahead of i
      mine -= behind;
      place[j] += behind;
    }
    *reinterpret_cast<Bytes*>(out + i * stride) = -__builtin_convertvector(mine < k, Bytes);
  }
}

// Calls f(i, line) for each line of cell j's matrix with W_q as a fifth gate: (S·d, 5·d).
template <typename T, typename F>
void side_by_side(const T* W, const T* W_q, bool shared, int j, int N, int K, int d, T* line, F f) {
  const int S = K + N, lines = S * d;
  const T* query = W_q ? W_q + (shared ? 0 : size_t(j) * (S - 1) * d * d) : nullptr;
  for (int i = 0; i < lines; ++i) {
    std::memcpy(line, W + (size_t(j) * lines + i) * 4 * d, sizeof(T) * 4 * d);
    const bool own = i / d == K + j;  // Eq. (19): without the cell's own state
    if (query && own) {
      std::memset(line + 4 * d, 0, sizeof(T) * d);
    } else if (query) {
      std::memcpy(line + 4 * d, query, sizeof(T) * d);
      query += d;
    }
    f(i, line);
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

// Eqs. (13)-(16) for a step: which cells wake and what each looks at. L samples at a time, a lane
// each; scores are added in one order for every pair, so that equal vectors have equal scores.
template <typename T> struct Choices {
  const Shape& n;
  const Buffers<T>& m;
  const int B, N, K, d, S;
  const size_t width;  // of a line of flags
  Array<T> V_T, s, relevance;
  Array<typename Lanes<T>::Int> integers;
  M<T>* place;
  Array<uint8_t> active, chosen, finite;  // (N, B), (N, K+N, B), (B)

  Choices(const Shape& n, const Buffers<T>& m)
      : n(n), m(m), B(n.B), N(n.N), K(n.K), d(n.d), S(K + N), width(flags_of(B)),
        V_T(size_t(S * d + L<T>) * L<T>), s(size_t(S) * L<T>), relevance(size_t(N) * L<T>),
        integers(size_t(S) * L<T>), place(reinterpret_cast<M<T>*>(integers.data)), active(N * width),
        chosen(size_t(N) * S * width), finite(width) {
    for (int j = 0; j < N; ++j) std::memset(active + j * width, 1, B);
    std::memset(chosen, 1, size_t(N) * S * width);
  }

  // Eq. (13): the scores of cell j for `count` vectors from `first` on.
  void score(int j, int first, int count) {
    const T *h = V_T + (K + j) * d * L<T>, *vectors = V_T + first * d * L<T>;
    in_parts<4>(count, [h, vectors, d = d, s = s.data](auto many_, int k) INLINED {
      constexpr int many = decltype(many_)::value;
      V<T> sum[many] = {};
      for (int i = 0; i < d; ++i)
        for (int a = 0; a < many; ++a)
          sum[a] += at(h + i * L<T>).v * at(vectors + ((k + a) * d + i) * L<T>).v;
      for (int a = 0; a < many; ++a) at(s + (k + a) * L<T>).v = sum[a];
    });
  }

  // What a cell leaves out is not multiplied, but zero times what is not finite is not zero.
  void add_left_out(int j, long sample, Rows<T> V_t, int P, T* out) {
    if (finite[sample]) return;
    T nothing = 0;
    for (int i = 0; i < S * d; ++i)
      if (!chosen[(j * S + i / d) * width + sample]) nothing += V_t[sample][i] * 0;
    for (int i = 0; i < P; ++i) out[i] += nothing;
  }

  // What was drawn in their place.
  void drawn(const T* noise, int count, size_t stride, int lanes) {
    for (int lane = 0; lane < lanes; ++lane)
      for (int k = 0; k < count; ++k) s[k * L<T> + lane] = noise[lane * stride + k];
  }

  // V (B, (K+N)·d) of step t, with zeros at the end.
  void operator()(long t, Rows<T> V_t) {
    const int lines = S * d;
    const bool some_views = n.K_x < K, some_peers = n.K_h < N - 1, some_cells = n.awake < N;
    for (long b = 0; b < B; b += L<T>) {
      const int lanes = B - b < L<T> ? B - b : L<T>;
      M<T> other = {};
      for (int i = 0; i < lines; i += L<T>) {
        V<T> block[L<T>];
        for (int lane = 0; lane < L<T>; ++lane)  // the last sample fills the rest
          block[lane] = at(V_t[b + std::min(lane, lanes - 1)] + i).v;
        transpose<T>(block);
        for (int k = 0; k < L<T>; ++k) {
          at(V_T + (i + k) * L<T>).v = block[k];
          other |= block[k] * 0 != 0;
        }
      }
      for (int lane = 0; lane < lanes; ++lane) finite[b + lane] = !other[lane];
      const size_t here = (t * B + b) * N;
      for (int j = 0; j < N; ++j) {
        uint8_t* to = chosen + j * S * width + b;
        if (some_views || some_cells) score(j, 0, K);
        if (some_cells) {  // Eq. (14)
          V<T> sum = {};
          for (int k = 0; k < K; ++k) sum += at(s + k * L<T>).v;
          at(relevance + j * L<T>).v = sum;
        }
        if (some_views) {  // Eq. (15)
          if (m.noise_views) drawn(m.noise_views + (here + j) * K, K, N * K, lanes);
          choose<T>(s, K, int(n.K_x), place, to, width);
        }
        if (some_peers) {  // Eq. (16)
          score(j, K, N);
          if (m.noise_peers) drawn(m.noise_peers + (here + j) * N, N, N * N, lanes);
          const T lowest = std::numeric_limits<float>::lowest();
          for (int k = 0; k < N; ++k) {
            const V<T> v = at(s + k * L<T>).v;
            at(s + k * L<T>).v = v < lowest ? V<T>{} + lowest : v;
          }
          at(s + j * L<T>).v = V<T>{} - std::numeric_limits<T>::infinity();
          choose<T>(s, N, int(n.K_h), place, to + K * width, width);
          std::memset(to + (K + j) * width, 1, lanes);
        }
      }
      if (!some_cells) continue;
      if (m.noise_cells) drawn(m.noise_cells + here, N, N, lanes);
      choose<T>(m.noise_cells ? s : relevance, N, int(n.awake), place, active + b, width);
    }
    for (int j = 0; j < N && some_cells; ++j) std::memset(active + j * width + B, 0, width - B);
  }
};

template <typename T> void forward(const Shape& n, const Buffers<T>& m, double scale) {
  const int B = n.B, D = n.D, N = n.N, K = n.K, d = n.d, S = K + N, lines = S * d;
  const int P = padded<T>((m.W_q ? 5 : 4) * d), P_in = padded<T>(K * d);
  const long R = B * n.awake;
  const size_t states = size_t(B) * N * d, tail = L<T>;
  const long stride = lines + LINE / sizeof(T);  // of V: zeros at the end, and room for P_in
  const bool short_slots = d < L<T>;
  Array<int32_t> starts(S * ROWS);
  Matrices<T> W(N, lines, P), W_in(1, m.W_in ? D : 0, P_in);
  Array<T> b(size_t(N) * P), b_in(P_in), vectors(size_t(B) * stride + tail),
      h(states + tail), c(states + tail), work(ROWS * P + tail), gates(ROWS * 4 * d + tail),
      c_new(ROWS * d + tail), tanh_c(ROWS * d + tail),
      ahead(ROWS * d + tail), z(ROWS + tail), kinds(4 * d + tail);
  const Rows<T> V_t{vectors, stride};
  Choices<T> choices(n, m);
  uint8_t every[ROWS], samples[ROWS + 8], some[ROWS + 8];
  for (int r = 0; r < ROWS; ++r) every[r] = r;
  std::memcpy(h, m.h, sizeof(T) * states);
  std::memcpy(c, m.c, sizeof(T) * states);
  Array<T> line(std::max(P, P_in));
  for (int i = 0; i < W_in.lines; ++i) {
    std::memcpy(line, m.W_in + size_t(i) * K * d, sizeof(T) * K * d);
    W_in.set(0, i, line);
  }
  if (m.b_in) std::memcpy(b_in, m.b_in, sizeof(T) * K * d);
  std::memset(line, 0, sizeof(T) * std::max(P, P_in));
  for (int j = 0; j < N; ++j) {
    side_by_side<T>(m.W, m.W_q, bool(n.shared), j, N, K, d, line,
                    [&](int i, const T* whole) { W.set(j, i, whole); });
    if (m.b) std::memcpy(b + j * P, m.b + size_t(j) * 4 * d, sizeof(T) * 4 * d);
  }
  std::fill_n(kinds + 3 * d, d + tail, T(1));

  for (long t = 0; t < n.T; ++t) {
    const long kept = n.save ? t : 0;
    for (long first = 0; first < B; first += ROWS) {
      const int rows = B - first < ROWS ? B - first : ROWS;
      const Rows<T> V_rows{V_t[first], stride};
      if (m.W_in)  // what is beyond the views is overwritten
        multiply<T>({m.x + (t * B + first) * D, D}, every, rows, W_in, 0, 0, D, b_in.data, V_rows);
      for (int r = 0; r < rows; ++r) {
        const long s = first + r;
        if (m.reset && m.reset[t * B + s]) {
          std::memset(h + s * N * d, 0, sizeof(T) * N * d);
          std::memset(c + s * N * d, 0, sizeof(T) * N * d);
        }
        if (!m.W_in) std::memcpy(V_rows[r], m.x + (t * B + s) * D, sizeof(T) * K * d);
        for (int i = 0; i < N * d; i += L<T>) at(V_rows[r] + K * d + i).v = at(h + s * N * d + i).v;
        at(V_rows[r] + lines).v = V<T>{};
        if (n.save) std::memcpy(m.V + (t * B + s) * lines, V_rows[r], sizeof(T) * lines);
      }
    }
    choices(t, V_t);

    long row = kept * R;
    for (int j = 0; j < N; ++j) {
      const long before = row;
      for (long first = 0; first < B; first += ROWS) {
        const uint8_t* active = choices.active + j * choices.width + first;
        const int here = std::min<long>(ROWS, choices.width - first);
        const int rows = list(active, active, here, samples);
        const T* bias = b + j * P;
        const Rows<const T> V_rows{V_t[first], stride};
        const Rows<T> sums{work, P};
        const uint8_t* chosen = choices.chosen + j * S * choices.width + first;
        for (int k = 0; k < S && short_slots; ++k)  // for what is not chosen stand zeros
          for (int r = 0; r < here; ++r)
            starts[k * ROWS + r] = r * int32_t(stride) + lines +
                                   (-int32_t(chosen[k * choices.width + r]) & (k * d - lines));
        if (short_slots) multiply<T>(V_rows, samples, rows, W, j, 0, d, bias, sums, S, starts);
        for (int r = 0; r < rows && !short_slots; ++r)
          std::memcpy(sums[samples[r]], bias, sizeof(T) * P);
        for (int k = 0; k < S && !short_slots; ++k) {  // long ones only with those that chose them
          const int terms = list(active, chosen + k * choices.width, here, some);
          multiply<T>({V_rows[0] + k * d, stride}, some, terms, W, j, k * d, d, nullptr, sums);
        }
        for (int r = 0; r < rows; ++r)
          choices.add_left_out(j, first + samples[r], V_t, P, sums[samples[r]]);
        // Eqs. (1)-(6). Whole vectors are stored; the next row overwrites the excess lanes.
        for (int r = 0; r < rows; ++r)
          for (int i = 0; i < 4 * d; i += L<T>)
            at(gates + r * 4 * d + i).v = squash<T>(at(work + samples[r] * P + i).v, at(kinds + i).v);
        for (int r = 0; r < rows; ++r) {
          const T *f = gates + r * 4 * d, *in = f + d, *g = in + 2 * d;
          const T* c_row = c + ((first + samples[r]) * N + j) * d;
          for (int i = 0; i < d; i += L<T>)
            at(c_new + r * d + i).v = at(f + i).v * at(c_row + i).v + at(in + i).v * at(g + i).v;
          if (n.save) std::memcpy(m.c_before + (row + r) * d, c_row, sizeof(T) * d);
        }
        for (int i = 0; i < rows * d; i += L<T>)
          at(tanh_c + i).v = squash<T>(at(c_new + i).v, V<T>{} + 1);
        for (int r = 0; r < rows; ++r) {
          const T *o = gates + (r * 4 + 2) * d, *q = work + samples[r] * P + 4 * d;
          const T* old = h + ((first + samples[r]) * N + j) * d;
          V<T> sum = {};
          for (int i = 0; i < d; i += L<T>) {
            const V<T> h_new = at(o + i).v * at(tanh_c + r * d + i).v, way = h_new - at(old + i).v;
            at(ahead + r * d + i).v = m.W_q ? way : h_new;
            if (m.W_q) sum += within<T>(i, d) ? way * at(q + i).v : V<T>{};
          }
          z[r] = T(scale) * total<T>(sum) + (m.update_bias ? m.update_bias[j] : 0);
        }
        // Eqs. (20)-(21): a softmax of two logits is a sigmoid of their difference
        for (int r = 0; r < rows && m.W_q; r += L<T>) at(z + r).v = squash<T>(at(z + r).v, V<T>{});
        for (int r = 0; r < rows; ++r) {
          const long s = first + samples[r], pair = s * N + j;
          if (m.live && !m.live[t * B + s]) continue;
          for (int i = 0; i < d; i += L<T>) {
            auto &h_row = at(h + pair * d + i), &c_row = at(c + pair * d + i);
            const V<T> way = at(ahead + r * d + i).v;
            h_row.v = within<T>(i, d) ? (m.W_q ? h_row.v + way * z[r] : way) : h_row.v;
            c_row.v = within<T>(i, d) ? at(c_new + r * d + i).v : c_row.v;
          }
        }
        if (n.save) {
          std::memcpy(m.gates + row * 4 * d, gates, sizeof(T) * rows * 4 * d);
          std::memcpy(m.tanh_c + row * d, tanh_c, sizeof(T) * rows * d);
          if (m.W_q) std::memcpy(m.a + row, z, sizeof(T) * rows);
          for (int r = 0; r < rows; ++r) {
            if (m.W_q) std::memcpy(m.q + (row + r) * d, work + samples[r] * P + 4 * d, sizeof(T) * d);
            m.pair[row + r] = (first + samples[r]) * N + j;
          }
        }
        row += rows;
      }
      if (n.awake < N) m.counts[kept * N + j] = row - before;
    }
    std::memcpy(m.y + t * states, h, sizeof(T) * states);
    const uint8_t *active = choices.active, *chosen = choices.chosen;
    uint8_t *to_active = m.active + t * B * N, *to_weight = m.weight + kept * B * N * S;
    const size_t width = choices.width;  // bytes may be anything's: all that is read here is local
    for (long s = 0; s < B; ++s) {
      const bool live = !m.live || m.live[t * B + s];
      for (int j = 0; j < N; ++j) *to_active++ = active[j * width + s] & live;
      for (int i = 0; i < N * S && n.save; ++i) *to_weight++ = chosen[i * width + s];
    }
  }
  std::memcpy(m.c, c, sizeof(T) * states);
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
  const size_t states = size_t(B) * N * d, views = size_t(B) * K * d, tail = L<T>;
  Matrices<T> W(N, G, Q);  // the transposed of five gates: (5·d, S·d)
  Array<T> D(size_t(B) * N * P + tail),
      V_t(size_t(B) * lines + tail), dh(states + tail), dc(states + tail), dV_x(views + tail),
      c(ROWS * d + tail), gates(ROWS * 4 * d + tail), tanh_c(ROWS * d + tail), q(ROWS * d + tail),
      dH(size_t(ROWS) * Q + tail);
  const size_t width = flags_of(B);
  Array<uint8_t> awake(N * width), chosen(N * S * width);
  uint8_t samples[ROWS + 8], some[ROWS + 8];
  const T one = 1;
  std::memcpy(dh, m.dh, sizeof(T) * states);
  std::memcpy(dc, m.dc, sizeof(T) * states);
  Array<T> line(P), transposed(size_t(G) * Q);
  for (int j = 0; j < N; ++j) {
    side_by_side<T>(m.W, m.W_q, bool(n.shared), j, N, K, d, line, [&](int i, const T* whole) {
      for (int k = 0; k < G; ++k) transposed[size_t(k) * Q + i] = whole[k];
    });
    for (int k = 0; k < G; ++k) W.set(j, k, transposed + size_t(k) * Q);
  }

  for (long t = n.T - 1; t >= 0; --t) {
    const T* dy = m.dy + t * states;
    const int64_t* pairs = m.pair + t * R;
    const uint8_t* active = m.active + t * B * N;
    std::memcpy(V_t, m.V + t * B * lines, sizeof(T) * B * lines);
    std::memset(dV_x, 0, sizeof(T) * views);
    std::memset(awake, 0, N * width);
    std::memset(chosen, 0, N * S * width);
    for (size_t i = 0; i < states; ++i) dh[i] += dy[i];
    for (long first = 0; first < R; first += ROWS) {
      const int rows = R - first < ROWS ? R - first : ROWS;
      const long saved = t * R + first;
      std::memcpy(c, m.c_before + saved * d, sizeof(T) * rows * d);
      std::memcpy(gates, m.gates + saved * 4 * d, sizeof(T) * rows * 4 * d);
      std::memcpy(tanh_c, m.tanh_c + saved * d, sizeof(T) * rows * d);
      if (m.W_q) std::memcpy(q, m.q + saved * d, sizeof(T) * rows * d);
      for (int r = 0; r < rows; ++r) {
        const long pair = pairs[first + r], s = pair / N, j = pair % N;
        if (!active[pair]) continue;
        T* D_r = D + (j * B + s) * P;
        awake[j * width + s] = 1;
        for (int k = 0; k < S; ++k)
          chosen[(j * S + k) * width + s] = m.weight[(t * B * N + pair) * S + k];
        const T *f = gates + r * 4 * d, *in = f + d, *o = in + d, *g = o + d;
        const T *t_c = tanh_c + r * d, *old = V_t + s * lines + (K + j) * d;
        T a = 1, dz = 0;
        if (m.W_q) {
          V<T> sum = {};
          for (int i = 0; i < d; i += L<T>) {
            const V<T> ahead = at(o + i).v * at(t_c + i).v - at(old + i).v;
            sum += within<T>(i, d) ? at(dh + pair * d + i).v * ahead : V<T>{};
          }
          a = m.a[saved + r];
          dz = total<T>(sum) * a * (1 - a);
          if (m.d_bias) m.d_bias[j] += dz;
          dz *= T(scale);
        }
        // The last vector first: its excess lanes are overwritten by the next gate.
        for (int i = (d - 1) / L<T> * L<T>; i >= 0; i -= L<T>) {
          const M<T> inside = within<T>(i, d);
          auto &dh_i = at(dh + pair * d + i), &dc_i = at(dc + pair * d + i);
          const V<T> f_i = at(f + i).v, in_i = at(in + i).v, o_i = at(o + i).v, g_i = at(g + i).v;
          const V<T> t_i = at(t_c + i).v;
          const V<T> tilde = m.W_q ? dh_i.v * a + dz * at(q + r * d + i).v : dh_i.v;
          const V<T> c_new = dc_i.v + tilde * o_i * (1 - t_i * t_i);
          const V<T> d_g = c_new * in_i * (1 - g_i * g_i), way = o_i * t_i - at(old + i).v;
          at(D_r + i).v = c_new * at(c + r * d + i).v * f_i * (1 - f_i);
          at(D_r + d + i).v = c_new * g_i * in_i * (1 - in_i);
          at(D_r + 2 * d + i).v = tilde * t_i * o_i * (1 - o_i);
          at(D_r + 3 * d + i).v = inside ? d_g : V<T>{};
          if (m.W_q) at(D_r + 4 * d + i).v = inside ? way * dz : V<T>{};
          dc_i.v = inside ? c_new * f_i : dc_i.v;
          dh_i.v = inside ? (m.W_q ? dh_i.v - tilde : V<T>{}) : dh_i.v;
        }
      }
    }
    for (int j = 0; j < N; ++j) {
      T* dW = m.dW ? m.dW + size_t(j) * (lines + 1) * P : nullptr;
      for (long first = 0; first < B; first += ROWS) {
        const uint8_t* active = awake + j * width + first;
        const int here = std::min<long>(ROWS, width - first);
        const int rows = list(active, active, here, samples);
        const T *D_j = D + (j * B + first) * P, *V_j = V_t + first * lines;
        for (int r = 0; r < rows; ++r) std::memset(dH + samples[r] * Q, 0, sizeof(T) * Q);
        multiply<T>({D_j, P}, samples, rows, W, j, 0, G, nullptr, {dH, Q});
        if (dW) add_outer<T>(&one, 0, D_j, samples, rows, 1, P, dW + size_t(lines) * P);
        for (int k = 0; k < S; ++k) {
          const int terms = list(active, chosen + (j * S + k) * width + first, here, some);
          T* d_v = k < K ? dV_x + (first * K + k) * d : dh + (first * N + k - K) * d;
          for (int r = 0; r < terms; ++r)
            for (int i = 0; i < d; i += L<T>) {
              auto& to = at(d_v + some[r] * (k < K ? K : N) * d + i);
              const V<T> sum = to.v + at(dH + some[r] * Q + k * d + i).v;
              to.v = within<T>(i, d) ? sum : to.v;
            }
          if (dW) add_outer<T>(V_j + k * d, lines, D_j, some, terms, d, P, dW + size_t(k) * d * P);
        }
      }
    }
    if (m.dV_x) std::memcpy(m.dV_x + t * views, dV_x, sizeof(T) * views);
    for (long s = 0; s < B && m.reset; ++s)
      if (m.reset[t * B + s]) {
        std::memset(dh + s * N * d, 0, sizeof(T) * N * d);
        std::memset(dc + s * N * d, 0, sizeof(T) * N * d);
      }
  }
  std::memcpy(m.dh, dh, sizeof(T) * states);
  std::memcpy(m.dc, dc, sizeof(T) * states);
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
