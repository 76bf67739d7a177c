#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "attention/cpu_call.h"
#include "mlx/backend/cpu/encoder.h"
#include "parallel.h"

namespace vqkv {
namespace {

/** Rows through a Hadamard basis: to the codes, or with `inverse` back. `diagonal` is of one head.
 */
void turn(const BasisParams& b, const float* diagonal, int width, bool inverse, const void* x,
          Real type, int64_t rows, float* out, float* scratch) {
  HadamardTile t{};
  t.x = x;
  t.type = type;
  t.count = rows;
  t.width = width;
  t.order = b.order;
  t.signs = diagonal;
  t.scale = b.scale;
  t.inverse = inverse;
  t.out = out;
  t.out_type = Real::f32;
  t.scratch = scratch;
  kernels().hadamard(t);
}

/** Query rows of a kv head, cut into tiles; row i is query i / G, head i % G of the GQA group. */
class Job {
 public:
  explicit Job(const Call& call) : c(call), p(c.p), group(p.heads / p.kv_heads) {
    const int64_t total = int64_t(group) * p.queries;
    lanes = total <= 4 ? 4 : total <= 8 ? 8 : kMaxLanes;
    tile_rows = static_cast<int>(std::min<int64_t>(total, lanes < kMaxLanes ? lanes : kMaxRows));
    tiles = (total + tile_rows - 1) / tile_rows;
    partial_floats = Partial::floats(tile_rows, p.value_dim);
    query_codes = reinterpret_cast<const float*>(c.in[kQueryCode]);
    const int dims = std::max({p.key.dims, p.pair.dims, p.value.dims});
    query_floats = int64_t(kMaxRows) * std::max(p.key_dim, channels(p.key) + channels(p.pair));
    scratch_floats = attention_scratch(dims);
  }

  void run() {
    if (p.key_basis.order > 0) {
      turn_queries();
    }
    const int64_t tasks = int64_t(p.batch) * p.kv_heads * tiles;
    const int splits = choose_splits(tasks);
    const int parts = splits + 1;  // the last is the tail
    if (splits == 1) {
      parallel_for(tasks, [&](int64_t i) {
        float* memory =
            thread_scratch<Call>(query_floats + scratch_floats + parts * partial_floats);
        float* partials = memory + query_floats + scratch_floats;
        const Tile t(*this, i);
        for (int part = 0; part < parts; ++part) {
          attend(t, part, splits, memory, partials + part * partial_floats);
        }
        merge(t, partials, parts);
      });
      return;
    }
    std::unique_ptr<float[]> partials(new float[tasks * parts * partial_floats]);
    parallel_for(tasks * parts, [&](int64_t i) {
      float* memory = thread_scratch<Call>(query_floats + scratch_floats);
      attend(Tile(*this, i / parts), static_cast<int>(i % parts), splits, memory,
             partials.get() + i * partial_floats);
    });
    parallel_for(tasks, [&](int64_t i) {
      merge(Tile(*this, i), partials.get() + i * parts * partial_floats, parts);
    });
  }

 private:
  struct Tile {
    int64_t batch, head, first;
    int rows;
    Visible sees[kMaxRows];
    int body_end = 0;

    Tile(const Job& j, int64_t i) {
      first = i % j.tiles * j.tile_rows;
      head = i / j.tiles % j.p.kv_heads;
      batch = i / j.tiles / j.p.kv_heads;
      const int64_t total = int64_t(j.group) * j.p.queries;
      rows = static_cast<int>(std::min<int64_t>(j.tile_rows, total - first));
      auto* layout = j.layout(batch);
      for (int r = 0; r < rows; ++r) {
        sees[r] = visible(j.p, layout, static_cast<int>((first + r) / j.group));
        body_end = std::max(body_end, sees[r].body);
      }
    }
  };

  /** The queries of a kv head lie together. */
  void turn_queries() {
    constexpr int64_t kRows = 64;
    const int64_t each = int64_t(group) * p.queries, runs = int64_t(p.batch) * p.kv_heads;
    const int width = p.key_dim;
    turned.reset(new float[runs * each * width]);
    query_codes = turned.get();
    auto* diagonal = reinterpret_cast<const float*>(c.in[kKeyDiagonal]);
    const int64_t rows = p.key_basis.per_head ? each : runs * each;
    const int64_t parts = (rows + kRows - 1) / kRows;
    parallel_for(runs * each / rows * parts, [&](int64_t i) {
      const int64_t run = i / parts, at = i % parts * kRows;
      const int64_t first = run * rows + at, head = p.key_basis.per_head ? run % p.kv_heads : 0;
      turn(p.key_basis, diagonal + head * width, width, false,
           c.in[kQuery] + first * width * c.dtype.size(), real_type(c.dtype),
           std::min(kRows, rows - at), turned.get() + first * width,
           thread_scratch<Call>(hadamard_scratch(width, 1)));
    });
  }

  const int32_t* layout(int64_t batch) const {
    return p.uniform ? p.counts : reinterpret_cast<const int32_t*>(c.in[kLayout]) + 3 * batch;
  }

  int choose_splits(int64_t tasks) const {
    const int threads = num_threads();
    const int64_t wanted = threads > 1 ? 2 * threads : 1;
    int longest = 0;
    for (int b = 0; b < p.batch; ++b) {
      longest = std::max(longest, visible(p, layout(b), p.queries - 1).body);
    }
    const int64_t useful = (longest + kSplitTokens - 1) / kSplitTokens;
    return static_cast<int>(
        std::clamp<int64_t>((wanted + tasks - 1) / tasks, 1, std::max<int64_t>(useful, 1)));
  }

  int64_t row_index(const Tile& t, int r) const {
    const int64_t query = (t.first + r) / group, head = t.head * group + (t.first + r) % group;
    return (t.batch * p.heads + head) * p.queries + query;
  }

  /** to[group of lanes][channel][lane] = q * scale, for `width` channels of rows `stride` apart. */
  template <typename T>
  void pack_queries(const Tile& t, const T* q, int64_t stride, int width, float* to) const {
    std::fill_n(to, int64_t(t.rows + lanes - 1) / lanes * lanes * width, 0.0f);
    for (int r = 0; r < t.rows; ++r) {
      const T* from = q + row_index(t, r) * stride;
      float* lane = to + int64_t(r / lanes) * lanes * width + r % lanes;
      for (int d = 0; d < width; ++d) {
        lane[int64_t(d) * lanes] = static_cast<float>(from[d]) * p.scale;
      }
    }
  }

  /** The mask rows of a tile, from the token at logical position `position` on. */
  void mask_rows(const Tile& t, int64_t position, MaskRow* to) const {
    const int64_t size = p.mask == MASK_BOOL ? 1 : p.mask == MASK_FLOAT ? 4 : 2;
    for (int r = 0; p.mask && r < t.rows; ++r) {
      const int64_t query = (t.first + r) / group, head = t.head * group + (t.first + r) % group;
      const auto& s = p.mask_strides;
      const int64_t at = t.batch * s[0] + head * s[1] + query * s[2] + position * s[3];
      to[r] = {c.in[kMask] + at * size, s[3],
               p.mask_columns > 1 ? p.mask_columns - position : std::numeric_limits<int64_t>::max(),
               static_cast<AttentionMask>(p.mask)};
    }
  }

  void attend(const Tile& t, int part, int splits, float* memory, Partial to) const {
    to.clear(t.rows, p.value_dim);
    int begin[kMaxRows], end[kMaxRows];
    AttentionTile a{};
    const int64_t head = t.batch * p.kv_heads + t.head;
    a.rows = t.rows;
    a.lanes = lanes;
    a.queries = memory;
    a.begin = begin;
    a.end = end;
    MaskRow mask[kMaxRows];
    a.mask = p.mask ? mask : nullptr;
    a.max = to.max;
    a.sum = to.sum;
    a.out = to.out;
    a.scratch = memory + query_floats;
    auto run = [&](int64_t first, int64_t last) {
      a.first = first;
      a.last = last;
      if (first < last) {
        kernels().attention(a);
      }
    };
    if (part < splits) {
      a.coded = true;
      a.keys = body_of(c, head, p.key, kKeyCodes);
      a.pair = body_of(c, head, p.pair, kPairCodes);
      a.values = body_of(c, head, p.value, kValueCodes);
      const int own = channels(p.key), both = own + channels(p.pair);
      const float* q = query_codes;
      float* pair_queries = memory + int64_t(kMaxRows) * own;
      pack_queries(t, q, both, own, memory);
      pack_queries(t, q + own, both, both - own, pair_queries);
      a.pair_queries = pair_queries;
      for (int r = 0; r < t.rows; ++r) {
        begin[r] = 0;
        end[r] = t.sees[r].body;
      }
      mask_rows(t, p.sink_tokens, mask);
      const int64_t step = (t.body_end + splits - 1) / splits;
      const int64_t size = (step + kSubTile - 1) / kSubTile * kSubTile;
      run(part * size, std::min<int64_t>((part + 1) * size, t.body_end));
      return;
    }
    a.keys = tail_of(c, head, kKeyTail);
    a.values = tail_of(c, head, kValueTail);
    auto pack = [&](auto* q) { pack_queries(t, q, p.key_dim, p.key_dim, memory); };
    if (c.dtype == mx::float32) {
      pack(reinterpret_cast<const float*>(c.in[kQuery]));
    } else if (c.dtype == mx::float16) {
      pack(reinterpret_cast<const mx::float16_t*>(c.in[kQuery]));
    } else {
      pack(reinterpret_cast<const mx::bfloat16_t*>(c.in[kQuery]));
    }
    int sinks = 0, first = p.tail, last = 0;
    mask_rows(t, 0, mask);
    for (int r = 0; r < t.rows; ++r) {
      begin[r] = 0;
      end[r] = t.sees[r].sinks;
      sinks = std::max(sinks, end[r]);
    }
    run(0, sinks);
    const int64_t start = layout(t.batch)[2];
    mask_rows(t, std::max<int64_t>(start - p.sink_tokens, 0), mask);
    for (int r = 0; r < t.rows; ++r) {
      begin[r] = t.sees[r].begin;
      end[r] = t.sees[r].end;
      if (begin[r] < end[r]) {
        first = std::min(first, begin[r]);
        last = std::max(last, end[r]);
      }
    }
    run(first, last);
  }

  template <typename T>
  static void write(char* out, int64_t row, int width, const float* from) {
    T* to = reinterpret_cast<T*>(out) + row * width;
    for (int d = 0; d < width; ++d) {
      to[d] = static_cast<T>(from[d]);
    }
  }

  void write_row(int64_t row, const float* code, const float* tail) const {
    const int width = p.value_dim;
    if (p.separate) {
      write<float>(c.out[0], row, width, code);
      write<float>(c.out[1], row, width, tail);
    } else if (c.dtype == mx::float32) {
      write<float>(c.out[0], row, width, code);
    } else if (c.dtype == mx::float16) {
      write<mx::float16_t>(c.out[0], row, width, code);
    } else {
      write<mx::bfloat16_t>(c.out[0], row, width, code);
    }
  }

  /** Adds up the parts of row r: those of codes, and the tail, apart if both are told apart. */
  void merge_row(const Tile& t, int r, float* partials, int parts, float* code, float* tail) const {
    const int width = p.value_dim;
    const float none = -std::numeric_limits<float>::infinity();
    float max = none, sum = 0, sink = none;
    if (p.sinks) {
      const int64_t head = t.head * group + (t.first + r) % group;
      sink = reinterpret_cast<const float*>(c.in[kSinks])[head] * kLog2E;
      max = sink;
    }
    for (int i = 0; i < parts; ++i) {
      max = std::fmax(max, Partial(partials + i * partial_floats).max[r]);
    }
    auto weight = [&](const Partial& x) { return x.sum[r] == 0 ? 0 : std::exp2(x.max[r] - max); };
    for (int i = 0; i < parts; ++i) {
      const Partial x(partials + i * partial_floats);
      sum += x.sum[r] * weight(x);
    }
    sum += sink == none ? 0 : std::exp2(sink - max);
    std::fill_n(code, width, 0.0f);
    std::fill_n(tail, width, 0.0f);
    for (int i = 0; i < parts && sum != 0; ++i) {
      const Partial x(partials + i * partial_floats);
      const float w = weight(x) / sum;
      float* to = (p.separate || p.value_basis.order > 0) && i + 1 == parts ? tail : code;
      for (int d = 0; d < width; ++d) {
        to[d] += w * x.out[r * out_stride(width) + d];
      }
    }
  }

  void merge(const Tile& t, float* partials, int parts) const {
    const int width = p.value_dim;
    std::vector<float> code(int64_t(t.rows) * width), tail(code.size());
    for (int r = 0; r < t.rows; ++r) {
      merge_row(t, r, partials, parts, &code[r * width], &tail[r * width]);
    }
    if (p.value_basis.order > 0) {
      std::vector<float> scratch(hadamard_scratch(width, 1));
      auto* diagonal = reinterpret_cast<const float*>(c.in[kValueDiagonal]);
      diagonal += p.value_basis.per_head ? t.head * width : 0;
      turn(p.value_basis, diagonal, width, true, code.data(), Real::f32, t.rows, code.data(),
           scratch.data());
      for (size_t i = 0; i < code.size(); ++i) {
        code[i] += tail[i];
      }
    }
    for (int r = 0; r < t.rows; ++r) {
      write_row(row_index(t, r), &code[r * width], &tail[r * width]);
    }
  }

  const Call& c;
  const AttentionParams& p;
  std::unique_ptr<float[]> turned;
  const float* query_codes;  // queries in the basis of the key codes
  int group, lanes, tile_rows;
  int64_t tiles, partial_floats, query_floats, scratch_floats;
};

}  // namespace

void attention_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out,
                   const AttentionParams& p, const mx::Stream& s) {
  Call c{p, {}, {}, in[kQuery].dtype(), {}};
  for (int i = 0; i < kAttentionInputs; ++i) {
    c.in[i] = in[i].data<char>();
    c.code_bytes[i] = in[i].nbytes();
  }
  for (size_t i = 0; i < out.size(); ++i) {
    c.out[i] = out[i].data<char>();
  }
  mx::cpu::get_command_encoder(s).dispatch([c] { Job(c).run(); });
}

}  // namespace vqkv
