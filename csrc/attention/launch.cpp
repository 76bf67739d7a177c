#include <algorithm>

#include "attention/primitive.h"
#include "mlx/allocator.h"

namespace vqkv {
namespace {

// metal/attention.metal: widest vector, query rows per threadgroup.
struct Variant {
  int width;
  int rows;
};
constexpr Variant kVariants[] = {{128, 16}, {256, 8}, {576, 4}};
constexpr uint32_t kThreads = 128;

// Enough threadgroups for a large GPU, but never less than 256 slots of work for one.
constexpr int64_t kTargetGroups = 512, kSlotsPerSplit = 256, kMaxSplits = 64;

mx::array temporary(mx::Shape shape, mx::Dtype dtype, std::vector<mx::array>& temporaries) {
  mx::array a(std::move(shape), dtype, nullptr, {});
  a.set_data(mx::allocator::malloc(a.nbytes()));
  temporaries.push_back(a);
  return a;
}

}  // namespace

std::vector<Launch> attention_launch(const std::vector<mx::array>& in,
                                     const std::vector<mx::array>& out, AttentionParams p,
                                     std::vector<mx::array>& temporaries) {
  const int width = std::max({p.key_dim, p.value_dim, in[kQueryCode].shape(3)});
  const auto* variant = std::find_if(std::begin(kVariants), std::end(kVariants),
                                     [&](const Variant& v) { return width <= v.width; });
  const auto dtype = in[kQuery].dtype();
  const int64_t tiles = groups(int64_t(p.heads / p.kv_heads) * p.queries, variant->rows);
  const int64_t heads = int64_t(p.batch) * p.kv_heads;
  const int64_t slots = int64_t(p.body) + p.tail;
  p.splits = static_cast<int>(std::clamp<int64_t>(
      std::min(kTargetGroups / std::max<int64_t>(1, tiles * heads), slots / kSlotsPerSplit), 1,
      kMaxSplits));

  const int64_t rows = int64_t(p.batch) * p.heads * p.queries;
  const bool turned = p.value_basis.order > 0, merged = p.splits > 1 || turned;
  const bool separate = p.separate;  // as outputs of the whole
  p.separate = separate || turned;   // as outputs of the first pass
  auto unused = [&](mx::Dtype t) { return temporary({1}, t, temporaries); };
  auto partial = [&](int last) {
    return temporary({static_cast<int>(rows), p.splits, last}, mx::float32, temporaries);
  };
  auto result = separate ? unused(dtype) : out[0];
  auto code = separate ? out[0] : unused(mx::float32);
  auto tail = separate ? out[1] : unused(mx::float32);

  Launch first;
  first.kernel = "attention_tile_" + dtype_name(dtype) + "_" + std::to_string(variant->width);
  first.inputs = in;
  first.grid = {static_cast<uint32_t>(tiles), groups(heads, 1), static_cast<uint32_t>(p.splits)};
  first.threads = kThreads;
  first.set_params(p);
  if (!merged) {
    first.outputs = {result, code, tail, unused(mx::float32)};
    return {first};
  }
  auto part = partial(p.value_dim), part_ml = partial(2);
  auto part_tail = p.separate ? partial(p.value_dim) : unused(mx::float32);
  first.outputs = {unused(dtype), part, part_tail, part_ml};

  Launch merge;
  merge.kernel = "attention_merge_" + dtype_name(dtype);
  merge.inputs = {part, part_tail, part_ml, in[kSinks], in[kValueDiagonal]};
  merge.outputs = {result, code, tail};
  merge.grid = {groups(rows, 1), 1, 1};
  merge.threads = kThreads;
  merge.set_params(p);
  return {first, merge};
}

}  // namespace vqkv
