#include <algorithm>

#include "attention/primitive.h"
#include "backend/backend.h"

namespace vqkv {
namespace {

// metal/attention.metal: widest vector, query rows per threadgroup.
struct Variant {
  int width;
  int rows;
};
constexpr Variant kVariants[] = {{128, 16}, {256, 8}, {576, 4}};
constexpr uint32_t kThreads = 128;

// metal/matrix_tokens.h: tokens of a step, which are read together; metal/compat/cuda.h: tables.
constexpr int kMatrixTokens = 64;
constexpr uint32_t kCudaTables = 256 * 256;

// metal/attention_prefill.h: simdgroups of 16 query rows, more on CUDA (TILE_SIMDS), where besides
// there may be some that only decode (TILE_PRODUCERS), and the tables, up to six tiles of 64
// tokens, the queries and the gates are in threadgroup memory. Fewer rows would leave most of a
// threadgroup idle.
constexpr int kPrefillSimds = 4, kCudaPrefillSimds = 8, kCudaPrefillProducers = 8;
constexpr int kCudaPrefillTokens = 6 * 64, kCudaPrefillGates = 128;
constexpr int64_t kPrefillRows = 48, kCudaPrefillRows = 64;

// Enough threadgroups to fill a large GPU of 132 cores once, a second round would be mostly empty;
// but never less than 256 tokens of work for one.
constexpr int64_t kCores = 132, kTokensPerSlice = 256;
// Prefill has a core for each threadgroup: four rounds, of which the last may be partly empty.
constexpr int64_t kPrefillGroups = 528, kPrefillTokensPerSlice = 1024;
// So many slices of a row, and rows as of prefill, are merged by a simdgroup.
constexpr int kFewSlices = 8;
constexpr int64_t kMaxSlices = ATTENTION_MAX_SLICES / 2;  // of the body, and of the tail

// Gets its memory where the launches run.
const mx::array& temporary(mx::Shape shape, mx::Dtype dtype, Temporaries& temporaries) {
  return temporaries.emplace_back(std::move(shape), dtype, nullptr, std::vector<mx::array>{});
}

/**
 * Slices of at least `least` tokens, unless there are fewer, of `tokens` tokens of each of `groups`
 * (row tile, kv head) pairs; `total` in all.
 */
int slices(int64_t tokens, int64_t groups, int64_t total, int64_t least) {
  if (tokens == 0) {
    return 0;
  }
  const int64_t wanted = std::clamp<int64_t>(total / std::max<int64_t>(1, groups), 1, kMaxSlices);
  const int64_t useful = (tokens + least - 1) / least;
  // equal numbers of steps for all
  const int64_t steps = (useful + wanted - 1) / wanted;
  return static_cast<int>((useful + steps - 1) / steps);
}

// What metal/attention_matrix.h calls a code of one table per head, empty if it knows none such.
std::string matrix_code(const CodeParams& c, int width) {
  if (c.window != 8 || c.per_group || c.entries * c.dims != width) {
    return "";
  }
  if (c.stride == 8 && (c.dims == 2 || c.dims == 4 || c.dims == 8)) {
    return std::to_string(c.dims);
  }
  return c.dims == 1 && c.stride <= 4 ? "trellis" + std::to_string(c.stride) : "";
}

/** The code of the kernels for simdgroup matrices that can do this call, empty if none can. */
std::string fits_matrices(const std::vector<mx::array>& in, const AttentionParams& p) {
  const int width = p.key_dim;
  const auto key = matrix_code(p.key, width), value = matrix_code(p.value, p.value_dim);
  // one kernel for all pairs of two trellis codes
  const bool trellises = key.starts_with("trellis") && value.starts_with("trellis");
  const std::string code = key == value ? key : trellises ? "trellis" : "";
  const bool even = width == 64 || width == 128 || width == 256;
  const bool equal = p.value_dim == width && in[kQueryCode].shape(3) == width;
  // rows of a trellis code are read by words, and steps begin with one
  const bool in_words = p.key.dims > 1 || p.body % 4 == 0;
  const bool fits =
      in[kQuery].dtype() != mx::float32 && even && equal && in_words &&
      (p.body == 0 || p.body >= kMatrixTokens) && p.pair.entries == 0 && p.mask == MASK_NONE &&
      p.scale > 0 && (!p.key.centred || p.block % 64 == 0) && !p.value.centred &&
      aligned(in[kKeyTail]) && aligned(in[kValueTail]) && aligned(in[kKeyCodes]) &&
      aligned(in[kValueCodes]) && (!p.key.centred || aligned(in[kKeyCentres])) &&
      (!p.key.scaled || aligned(in[kKeyScales])) && (!p.value.scaled || aligned(in[kValueScales]));
  return fits ? code : "";
}

}  // namespace

std::array<Launch, 2> attention_launch(const std::vector<mx::array>& in,
                                       const std::vector<mx::array>& out, AttentionParams p,
                                       Temporaries& temporaries) {
  const auto dtype = in[kQuery].dtype();
  const int64_t rows_of_head = int64_t(p.heads / p.kv_heads) * p.queries;
  const int64_t heads = int64_t(p.batch) * p.kv_heads;

  std::array<Launch, 2> both;
  auto& [first, merge] = both;
  first.threads = kThreads;
  int rows_per_group, groups_per_core = 3;
  int64_t least = kTokensPerSlice;
  const bool cuda = !backend::simulated() && std::string(backend::gpu_executor()) == "cuda";
  const auto code = fits_matrices(in, p);
  const bool matrices = !code.empty(), trellis = matrices && p.key.dims == 1;
  const bool prefill =
      matrices && p.key_dim <= 128 && rows_of_head >= (cuda ? kCudaPrefillRows : kPrefillRows);
  if (prefill) {
    const int simds = cuda ? kCudaPrefillSimds : kPrefillSimds;
    rows_per_group = 16 * simds;
    first.threads = 32 * simds;
    first.cuda_more_threads = 32 * kCudaPrefillProducers;
    least = kPrefillTokensPerSlice;
    first.cuda_shared_bytes =
        kCudaTables + (kCudaPrefillTokens + rows_per_group) * p.key_dim * 2 + kCudaPrefillGates;
    first.kernel = KernelName("attention_prefill", dtype_name(dtype), p.key_dim, code);
  } else if (matrices) {
    // decoding takes longest for a trellis code, and no less for fewer rows
    const int least_rows = trellis ? 8 : 4, most_rows = trellis && p.key_dim > 128 ? 8 : 16;
    rows_per_group = std::clamp(rows_of_head <= 4   ? 4
                                : rows_of_head <= 8 ? 8
                                                    : 16,
                                least_rows, most_rows);
    groups_per_core = rows_per_group == 4 && p.key_dim < 256 ? 3 : 2;
    first.cuda_shared_bytes = kCudaTables;
    first.kernel =
        KernelName("attention_matrix", dtype_name(dtype), p.key_dim, code, rows_per_group);
  } else {
    const int width = std::max({p.key_dim, p.value_dim, in[kQueryCode].shape(3)});
    const auto* variant = std::find_if(std::begin(kVariants), std::end(kVariants),
                                       [&](const Variant& v) { return width <= v.width; });
    rows_per_group = variant->rows;
    first.kernel = KernelName("attention_tile", dtype_name(dtype), variant->width);
  }
  const int64_t tiles = groups(rows_of_head, rows_per_group);
  const int64_t pairs = tiles * heads;
  const int64_t target = prefill ? kPrefillGroups : kCores * groups_per_core;
  if (prefill) {
    const int64_t of_tail = target * p.tail / std::max(1, p.tail + p.body);
    p.tail_splits = slices(p.tail, pairs, of_tail, least);
    p.splits = slices(p.body, pairs, target, least);
  } else {
    p.tail_splits = slices(p.tail, pairs, target, least);
    p.splits = slices(p.body, pairs, target - p.tail_splits * pairs, least);
  }
  const int all = std::max(p.splits + p.tail_splits, 1);
  p.tail_splits = all - p.splits;

  const int rows = static_cast<int>(heads * rows_of_head);
  const auto& part = temporary({rows, all, p.value_dim}, mx::float32, temporaries);
  const auto& part_ml = temporary({rows, all, 2}, mx::float32, temporaries);
  for (int i = 0; i < kSinks; ++i) {
    first.inputs.push_back(&in[i]);
  }
  first.inputs.push_back(&in[kKeyDiagonal]);
  first.outputs = arrays(part, part_ml);
  first.grid = {static_cast<uint32_t>(tiles), groups(heads, 1), static_cast<uint32_t>(all)};
  first.params.set(p);

  const bool by_rows = prefill && all <= kFewSlices;
  merge.kernel = by_rows ? KernelName("attention_merge_rows", dtype_name(dtype), p.value_dim)
                         : KernelName("attention_merge", dtype_name(dtype));
  merge.inputs = arrays(part, part_ml, in[kSinks], in[kValueDiagonal]);
  // whole, or of codes and tail; part stands for what is not written
  if (p.separate) {
    merge.outputs = arrays(part, out[0], out[1]);
  } else {
    merge.outputs = arrays(out[0], part, part);
  }
  merge.grid = {groups(rows, by_rows ? kThreads / 32 : 1), 1, 1};
  merge.threads = kThreads;
  merge.params.set(p);
  return both;
}

}  // namespace vqkv
