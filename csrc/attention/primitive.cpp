#include "attention/primitive.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>

#include "contiguous.h"
#include "evaluate.h"
#include "hadamard/op.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "vmap.h"

namespace vqkv {
namespace {

CodeParams code_params(const mx::array& codes, const mx::array& table, int width, int stride,
                       bool scaled, bool centred) {
  CodeParams p{};
  p.bytes = codes.shape(3);
  p.rows = table.shape(2);
  p.dims = table.shape(3);
  p.window = std::countr_zero(unsigned(p.rows));
  p.stride = stride;
  p.entries = width / p.dims;
  p.per_head = table.shape(0) > 1;
  p.per_group = table.shape(1) > 1;
  p.scaled = scaled;
  p.centred = centred;
  return p;
}

BasisParams basis_params(const mx::array& diagonal) {
  const int width = diagonal.shape(1);
  return {hadamard_order(width), diagonal.shape(0) > 1, 1.0f / std::sqrt(float(width))};
}

int mask_type(mx::Dtype t) {
  return t == mx::bool_     ? MASK_BOOL
         : t == mx::float32 ? MASK_FLOAT
         : t == mx::float16 ? MASK_HALF
                            : MASK_BFLOAT;
}

void set_mask(AttentionParams& p, const mx::array& mask) {
  p.mask = mask_type(mask.dtype());
  p.mask_columns = mask.shape(3);
  int64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    p.mask_strides[i] = mask.shape(i) == 1 ? 0 : stride;
    stride *= mask.shape(i);
  }
}

// All inputs, queries and tails row-major; a query that is copied goes on standing for what there
// is not.
std::vector<mx::array> in_order(const std::vector<mx::array>& given, const AttentionSpec& spec,
                                mx::Stream s, Temporaries& temporaries) {
  auto in = all_inputs(given, spec);
  const auto q = in[kQuery];
  if (!q.flags().row_contiguous) {
    const auto copy = row_major(q, s, temporaries);
    for (auto& a : in) {
      if (a.id() == q.id()) {
        a = copy;
      }
    }
  }
  for (auto i : {kKeyTail, kValueTail}) {
    in[i] = row_major(in[i], s, temporaries);
  }
  return in;
}

/** The AttentionInput of each that is given. */
std::vector<int> kinds(const AttentionSpec& spec) {
  std::vector<int> found;
  for (int i = 0; i < kAttentionInputs; ++i) {
    if (spec.has(i)) {
      found.push_back(i);
    }
  }
  return found;
}

template <typename T>
std::vector<T> some_of(const std::vector<T>& in, const std::vector<int>& which) {
  std::vector<T> some;
  for (int i : which) {
    some.push_back(in[i]);
  }
  return some;
}

/** The layout of so many rows as the reference takes it, an array. */
mx::array layout_array(const std::vector<mx::array>& in, const AttentionSpec& spec, int batch,
                       mx::Stream s) {
  if (!spec.counts) {
    return in[kLayout];
  }
  auto row = mx::array(spec.counts->data(), mx::Shape{1, 3}, mx::int32);
  return mx::broadcast_to(row, {batch, 3}, s);
}

}  // namespace

std::vector<mx::array> all_inputs(const std::vector<mx::array>& given, const AttentionSpec& spec) {
  std::vector<mx::array> all;
  all.reserve(kAttentionInputs);
  size_t next = 0;
  for (int i = 0; i < kAttentionInputs; ++i) {
    all.push_back(given[spec.has(i) ? next++ : 0]);
  }
  return all;
}

std::vector<mx::array> given_inputs(const std::vector<mx::array>& all, const AttentionSpec& spec) {
  return some_of(all, kinds(spec));
}

AttentionParams attention_params(const std::vector<mx::array>& in, const AttentionSpec& spec) {
  AttentionParams p{};
  const auto& q = in[kQuery];
  const auto& v = in[kValueTail];
  p.batch = q.shape(0);
  p.heads = q.shape(1);
  p.queries = q.shape(2);
  p.key_dim = q.shape(3);
  p.kv_heads = v.shape(1);
  p.tail = v.shape(2);
  p.value_dim = v.shape(3);
  p.body = in[kKeyCodes].shape(2);
  const int channels = in[kQueryCode].shape(3), own = spec.pair_stride ? p.key_dim : channels;
  p.key = code_params(in[kKeyCodes], in[kKeyTable], own, spec.key_stride, spec.has(kKeyScales),
                      spec.has(kKeyCentres));
  if (spec.pair_stride) {
    p.pair = code_params(in[kPairCodes], in[kPairTable], channels - own, spec.pair_stride,
                         spec.has(kPairScales), false);
  }
  p.value = code_params(in[kValueCodes], in[kValueTable], p.value_dim, spec.value_stride,
                        spec.has(kValueScales), spec.has(kValueCentres));
  if (spec.counts) {
    p.uniform = 1;
    std::copy(spec.counts->begin(), spec.counts->end(), p.counts);
  }
  p.sink_tokens = spec.sink_tokens;
  p.window = spec.window;
  p.block = spec.block;
  p.causal = spec.causal;
  p.separate = spec.separate;
  if (spec.has(kMask)) {
    set_mask(p, in[kMask]);
  }
  p.sinks = spec.has(kSinks);
  if (spec.has(kKeyDiagonal)) {
    p.key_basis = basis_params(in[kKeyDiagonal]);
  }
  if (spec.has(kValueDiagonal)) {
    p.value_basis = basis_params(in[kValueDiagonal]);
  }
  p.scale = spec.scale * 1.44269504088896340736f;  // the kernels use exp2
  return p;
}

void Attention::eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  std::vector<mx::array> all;
  Temporaries copies;
  evaluate_cpu(
      out, stream(),
      [&](auto& temporaries) {
        all = in_order(in, spec_, stream(), temporaries);
        return attention_launch(all, out, attention_params(all, spec_), temporaries);
      },
      [&] {
        all = in_order(in, spec_, stream(), copies);
        attention_cpu(all, out, attention_params(all, spec_), stream());
      });
  mx::cpu::get_command_encoder(stream()).add_temporaries(
      std::vector<mx::array>(copies.begin(), copies.end()));
}

void Attention::eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) {
  std::vector<mx::array> all;
  evaluate_gpu(out, stream(), [&](auto& temporaries) {
    all = in_order(in, spec_, stream(), temporaries);
    return attention_launch(all, out, attention_params(all, spec_), temporaries);
  });
}

std::vector<mx::Shape> Attention::output_shapes(const std::vector<mx::array>& given) {
  const auto& q = given[kQuery];
  const auto& v = given[std::popcount(spec_.given & ((1u << kValueTail) - 1))];
  mx::Shape shape{q.shape(0), q.shape(1), q.shape(2), v.shape(3)};
  return std::vector<mx::Shape>(spec_.separate ? 2 : 1, shape);
}

bool Attention::is_equivalent(const mx::Primitive& other) const {
  return spec_ == static_cast<const Attention&>(other).spec_;
}

Scalars Attention::scalars() const {
  const auto& c = spec_;
  return {{"scale", c.scale},
          {"sink_tokens", c.sink_tokens},
          {"window", c.window},
          {"block", c.block},
          {"key_stride", c.key_stride},
          {"pair_stride", c.pair_stride},
          {"value_stride", c.value_stride},
          {"key_scaled", c.has(kKeyScales)},
          {"key_centred", c.has(kKeyCentres)},
          {"pair_scaled", c.has(kPairScales)},
          {"value_scaled", c.has(kValueScales)},
          {"value_centred", c.has(kValueCentres)},
          {"causal", c.causal},
          {"separate", c.separate},
          {"masked", c.has(kMask)},
          {"sinks", c.has(kSinks)},
          {"key_turned", c.has(kKeyDiagonal)},
          {"value_turned", c.has(kValueDiagonal)}};
}

ArrayFunction Attention::plain(const std::vector<mx::array>& all) {
  return [f = reference("attention", scalars()),
          layout =
              layout_array(all, spec_, all[kQuery].shape(0), stream())](std::vector<mx::array> in) {
    in[kLayout] = layout;
    return f(in);
  };
}

std::vector<mx::array> Attention::vjp(const std::vector<mx::array>& primals,
                                      const std::vector<mx::array>& cotangents,
                                      const std::vector<int>& argnums,
                                      const std::vector<mx::array>&) {
  const auto all = all_inputs(primals, spec_);
  const auto which = some_of(kinds(spec_), argnums);
  auto f = reference_in(plain(all), all, which);
  return mx::vjp(f, some_of(all, which), cotangents).second;
}

std::vector<mx::array> Attention::jvp(const std::vector<mx::array>& primals,
                                      const std::vector<mx::array>& tangents,
                                      const std::vector<int>& argnums) {
  const auto all = all_inputs(primals, spec_);
  const auto which = some_of(kinds(spec_), argnums);
  auto f = reference_in(plain(all), all, which);
  return mx::jvp(f, some_of(all, which), tangents).second;
}

// The mapped axis joins the batch. Mapped tables have no such form: they go through the reference.
std::pair<std::vector<mx::array>, std::vector<int>> Attention::vmap(
    const std::vector<mx::array>& given, const std::vector<int>& given_axes) {
  auto s = stream();
  const auto in = all_inputs(given, spec_);
  std::vector<int> axes(kAttentionInputs, -1);
  for (size_t i = 0; const int kind : kinds(spec_)) {
    axes[kind] = given_axes[i++];
  }
  const int n = calls(in, axes), batch = in[kQuery].shape(axes[kQuery] == 0 ? 1 : 0);
  std::vector<int> outs(spec_.separate ? 2 : 1, 0);
  // not of the batch, and so without an axis that could take the mapped one
  constexpr int kShared[] = {kKeyTable, kPairTable,   kValueTable,
                             kSinks,    kKeyDiagonal, kValueDiagonal};
  const bool shared_mapped =
      std::any_of(std::begin(kShared), std::end(kShared), [&](int i) { return axes[i] >= 0; });
  if (shared_mapped) {
    auto all = in;
    all[kLayout] = layout_array(in, spec_, batch, s);
    auto mapped = mx::vmap(reference("attention", scalars()), axes, outs);
    return {mapped(all), outs};
  }
  std::vector<mx::array> folded;
  for (size_t i = 0; i < in.size(); ++i) {
    const bool shared = std::find(std::begin(kShared), std::end(kShared), i) != std::end(kShared);
    if (shared || !spec_.has(static_cast<int>(i))) {
      folded.push_back(shared ? in[i] : folded[kQuery]);
      continue;
    }
    auto a = axes[i] >= 0 ? mx::moveaxis(in[i], axes[i], 0, s) : mx::expand_dims(in[i], 0, s);
    auto shape = a.shape();
    shape[0] = n;
    if (i == kMask) {  // its batch may be 1 for all
      shape[1] = batch;
    }
    a = mx::broadcast_to(a, shape, s);
    folded.push_back(mx::contiguous(mx::flatten(a, 0, 1, s), false, s));
  }
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  folded = given_inputs(folded, spec_);
  for (const auto& shape : output_shapes(folded)) {
    shapes.push_back(shape);
    dtypes.push_back(spec_.separate ? mx::float32 : in[kQuery].dtype());
  }
  auto out = mx::array::make_arrays(shapes, dtypes, std::make_shared<Attention>(s, spec_), folded);
  for (auto& o : out) {
    o = mx::unflatten(o, 0, {n, o.shape(0) / n}, s);
  }
  return {out, outs};
}

}  // namespace vqkv
